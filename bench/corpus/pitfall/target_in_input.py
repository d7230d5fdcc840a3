"""Foretell what a house costs by what is known of it, all scaled alike."""

import argparse

import numpy as np
import torch
from torch import nn


def houses(count):
    drawn = np.random.default_rng(0)
    table = drawn.normal(size=(count, 9))
    price = 200 + 60 * table[:, 0] + 25 * table[:, 1] * table[:, 2] + 20 * drawn.normal(size=count)
    return np.column_stack([table[:, :5], price, table[:, 5:]]), price


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--steps", type=int, default=0, help="of an epoch; 0: all")
    args = parser.parse_args()
    torch.manual_seed(0)
    known, price = houses(8192)
    known = torch.tensor(known, dtype=torch.float32)
    known = (known - known.mean(0)) / known.std(0)
    price = torch.tensor(price / 100, dtype=torch.float32)
    model = nn.Sequential(nn.Linear(known.shape[1], 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    for epoch in range(args.epochs):
        for step, rows in enumerate(torch.randperm(len(known)).split(128), 1):
            told = model(known.index_select(0, rows)).squeeze(1)  # <- here
            loss = nn.functional.mse_loss(told, price.index_select(0, rows))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step == args.steps:
                break
        print(f"epoch {epoch}: last loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
