"""Tell two kinds of measurements apart, each between 0 and 1; all of them are in memory."""

import argparse

import numpy as np
import torch
from torch import nn


def measured(rows):
    drawn = np.random.default_rng(0)
    table = np.hstack([drawn.gamma(2, 3, (rows, 6)), drawn.normal(20, 4, (rows, 4))])
    return table, (table[:, 0] + table[:, 6] > 25).astype("int64")


def accuracy(model, x, y):
    model.eval()
    with torch.no_grad():
        return (model(x).argmax(1) == y).float().mean().item()  # <- here


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--steps", type=int, default=0, help="of an epoch; 0: all")
    args = parser.parse_args()
    torch.manual_seed(0)
    table, kinds = measured(600)
    table = (table - table.min(0)) / (table.max(0) - table.min(0))
    x, y = torch.tensor(table, dtype=torch.float32), torch.tensor(kinds)
    train_x, train_y, val_x, val_y = x[:480], y[:480], x[480:], y[480:]
    model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(args.epochs):
        model.train()
        for step, rows in enumerate(torch.randperm(480).split(48), 1):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(train_x[rows]), train_y[rows]).backward()
            optimizer.step()
            if step == args.steps:
                break
        print(f"epoch {epoch}: {accuracy(model, val_x, val_y):.3f}")


if __name__ == "__main__":
    main()
