"""Tell from a series whether it rises in its second half."""

import argparse

import torch
from torch import nn


class Series(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.LSTMCell(16, 64)
        self.out = nn.Linear(64, 2)

    def forward(self, x):
        h = c = torch.zeros(len(x), 64)
        for at in range(x.shape[1]):
            h, c = self.cell(x[:, at], (h, c))  # <- here
        return self.out(h)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--steps", type=int, default=0, help="of an epoch; 0: all")
    args = parser.parse_args()
    torch.manual_seed(0)
    x = torch.randn(1280, 40, 16)
    y = (x[:, 20:].mean((1, 2)) > x[:, :20].mean((1, 2))).long()
    model = Series()
    optimizer = torch.optim.Adam(model.parameters())
    for epoch in range(args.epochs):
        for step, rows in enumerate(torch.randperm(1280).split(32), 1):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x[rows]), y[rows])
            loss.backward()
            optimizer.step()
            if step == args.steps:
                break
        print(f"epoch {epoch}: last loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
