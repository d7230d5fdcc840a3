"""Tell handwritten digits apart, by blocks of a layer and its activation."""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn


class Block(nn.Module):
    def __init__(self, width, out):
        super().__init__()
        self.linear = nn.Linear(width, out)

    def forward(self, x):
        return torch.relu(self.linear(x))


class Digits(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(Block(64, 128), Block(128, 64))
        self.head = Block(64, 10)

    def forward(self, x):
        return self.head(self.blocks(x))


def fit(model, optimizer, x, y, epochs, steps):
    for epoch in range(epochs):
        for step, rows in enumerate(torch.randperm(len(x)).split(64), 1):
            scores = model(x.index_select(0, rows))
            loss = nn.functional.cross_entropy(scores, y.index_select(0, rows))  # <- here
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step == steps:
                break
        print(f"epoch {epoch}: last loss {loss.item():.3f}")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--steps", type=int, default=0, help="of an epoch; 0: all")
    args = parser.parse_args()
    torch.manual_seed(0)
    pixels, digits = load_digits(return_X_y=True)
    x, y = torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(digits)
    model = Digits()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    fit(model, optimizer, x, y, args.epochs, args.steps)


if __name__ == "__main__":
    main()
