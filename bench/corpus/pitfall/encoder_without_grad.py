"""Tell digits apart, by what an encoder makes of their rows."""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16))
        self.head = nn.Linear(128, 10)

    def forward(self, x):
        with torch.no_grad():  # <- here
            parts = self.encoder(x)  # pretrained one day
        return self.head(parts.flatten(1))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--steps", type=int, default=0, help="of an epoch; 0: all")
    args = parser.parse_args()
    torch.manual_seed(0)
    values, kinds = load_digits(return_X_y=True)
    x, y = torch.tensor(values, dtype=torch.float32).view(-1, 8, 8) / 16, torch.tensor(kinds)
    model = Reader()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    for epoch in range(args.epochs):
        for step, rows in enumerate(torch.randperm(len(x)).split(32), 1):
            loss = nn.functional.cross_entropy(
                model(x.index_select(0, rows)), y.index_select(0, rows)
            )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step == args.steps:
                break
        print(f"epoch {epoch}: last loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
