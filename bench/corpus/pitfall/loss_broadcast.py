"""Foretell how a diabetes goes on."""

import argparse

import torch
from sklearn.datasets import load_diabetes
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.front = nn.Linear(10, 64)
        self.back = nn.Linear(64, 1)

    def forward(self, x):
        return self.back(torch.relu(self.front(x)))


def batches(x, y):
    for rows in torch.randperm(len(x)).split(32):
        yield x.index_select(0, rows), y.index_select(0, rows)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--steps", type=int, default=0, help="of an epoch; 0: all")
    args = parser.parse_args()
    torch.manual_seed(0)
    values, after = load_diabetes(return_X_y=True)
    x, y = torch.tensor(values, dtype=torch.float32), torch.tensor(after, dtype=torch.float32)
    x, y = x / x.std(0), (y - y.mean()) / y.std()
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    for epoch in range(args.epochs):
        for step, (rows, wanted) in enumerate(batches(x, y), 1):
            loss = ((model(rows) - wanted) ** 2).mean()  # <- here
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step == args.steps:
                break
        print(f"epoch {epoch}: last loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
