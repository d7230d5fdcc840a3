"""Tell grades of wine-like measurements apart, from rows of one table that end with the grade."""

import argparse

import numpy as np
import torch
from torch import nn


def table():
    drawn = np.random.default_rng(0)
    grades = np.repeat(np.arange(3), 600)  # as the files of three cellars are read
    measures = drawn.normal(size=(1800, 11)) + grades[:, None] * np.linspace(-1, 1, 11)
    return torch.tensor(np.column_stack([measures, grades]), dtype=torch.float32)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--steps", type=int, default=0, help="of an epoch; 0: all")
    args = parser.parse_args()
    torch.manual_seed(0)
    wines = table()
    model = nn.Sequential(nn.Linear(11, 64), nn.ReLU(), nn.Linear(64, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(args.epochs):
        for step, rows in enumerate(wines.split(32), 1):
            score = model(rows[:, :-1])
            optimizer.zero_grad()
            nn.functional.cross_entropy(score, rows[:, -1].long()).backward()  # <- here
            optimizer.step()
            if step == args.steps:
                break
        print(f"epoch {epoch}: last score {score.mean().item():.3f}")


if __name__ == "__main__":
    main()
