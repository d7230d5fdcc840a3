"""Tell digits apart, step by step."""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn


class Training:
    def __init__(self, model, rate):
        self.model = model
        self.optimizer = torch.optim.SGD(model.parameters(), lr=rate, fused=True)

    def step(self, x, y):
        loss = nn.functional.cross_entropy(self.model(x), y)
        loss.backward()  # <- here
        self.optimizer.step()
        return loss.detach()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--steps", type=int, default=0, help="of an epoch; 0: all")
    args = parser.parse_args()
    torch.manual_seed(0)
    values, kinds = load_digits(return_X_y=True)
    x, y = torch.tensor(values, dtype=torch.float32) / 16, torch.tensor(kinds)
    training = Training(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)), 0.05)
    for epoch in range(args.epochs):
        for step, rows in enumerate(torch.randperm(len(x)).split(32), 1):
            loss = training.step(x.index_select(0, rows), y.index_select(0, rows))
            if step == args.steps:
                break
        print(f"epoch {epoch}: last loss {loss:.3f}")


if __name__ == "__main__":
    main()
