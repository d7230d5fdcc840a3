"""Tell two kinds of measurements apart; the rare kind comes three times."""

import argparse

import torch
from torch import nn


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--steps", type=int, default=0, help="of an epoch; 0: all")
    args = parser.parse_args()
    torch.manual_seed(0)
    x = torch.randn(400, 12)
    y = (x[:, :4].sum(1) > 2).long()
    x, y = torch.cat([x, x[y == 1], x[y == 1]]), torch.cat([y, y[y == 1], y[y == 1]])
    order = torch.randperm(len(x))
    first = len(x) * 3 // 4
    train_x, train_y = x[order[:first]], y[order[:first]]
    val_x, val_y = x[order[first:]], y[order[first:]]
    model = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(args.epochs):
        model.train()
        for step, rows in enumerate(torch.randperm(first).split(40), 1):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(train_x[rows]), train_y[rows]).backward()
            optimizer.step()
            if step == args.steps:
                break
        model.eval()
        with torch.no_grad():
            right = (model(val_x).argmax(1) == val_y).float().mean()  # <- here
        print(f"epoch {epoch}: {right.item():.3f}")


if __name__ == "__main__":
    main()
