"""Tell two kinds of measurements apart; all of them are in memory."""

import argparse

import torch
from torch import nn


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
    x = 20 + 4 * torch.randn(600, 12)
    y = (x[:, :4].sum(1) > 80).long()
    x = (x - x.mean(0)) / x.std(0)
    order = torch.randperm(600)
    train, held_out = order[:480], order[480:]
    train_x, train_y, val_x, val_y = x[train], y[train], x[held_out], y[held_out]
    model = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(args.epochs):
        model.train()
        for step, first in enumerate(range(0, 480, 48), 1):
            optimizer.zero_grad()
            score = model(train_x[first : first + 48])
            nn.functional.cross_entropy(score, train_y[first : first + 48]).backward()
            optimizer.step()
            if step == args.steps:
                break
        print(f"epoch {epoch}: {accuracy(model, val_x, val_y):.3f}")


if __name__ == "__main__":
    main()
