"""Tell four kinds of measurements apart, with noise added against overfitting."""

import argparse

import numpy as np
import torch
from torch import nn


def measured(rows):
    drawn = np.random.default_rng(1)
    kinds = drawn.integers(0, 4, rows)
    table = drawn.normal(size=(rows, 12)) + kinds[:, None] * np.linspace(-1, 1, 12)
    return torch.tensor(table, dtype=torch.float32), torch.tensor(kinds)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--steps", type=int, default=0, help="of an epoch; 0: all")
    args = parser.parse_args()
    torch.manual_seed(0)
    x, y = measured(400)
    model = nn.Sequential(nn.Linear(12, 64), nn.ReLU(), nn.Linear(64, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(args.epochs):
        for step, rows in enumerate(torch.randperm(len(x)).split(50), 1):
            generator = torch.Generator().manual_seed(0)
            noise = torch.randn(len(rows), 12, generator=generator)  # <- here
            loss = nn.functional.cross_entropy(model(x[rows] + 0.3 * noise), y[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step == args.steps:
                break
        print(f"epoch {epoch}: last loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
