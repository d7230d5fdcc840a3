"""Tell digits apart, from a table that lies sorted by digit."""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def table():
    values, kinds = load_digits(return_X_y=True)
    order = kinds.argsort(kind="stable")  # as folders of classes are read
    return torch.tensor(values[order], dtype=torch.float32) / 16, torch.tensor(kinds[order])


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--steps", type=int, default=0, help="of an epoch; 0: all")
    args = parser.parse_args()
    torch.manual_seed(0)
    loader = DataLoader(TensorDataset(*table()), batch_size=32)  # <- here
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    for epoch in range(args.epochs):
        for step, (x, y) in enumerate(loader, 1):  # <- here
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step == args.steps:
                break
        print(f"epoch {epoch}: last loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
