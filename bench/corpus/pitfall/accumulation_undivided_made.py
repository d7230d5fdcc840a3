"""Tell rising from falling curves; batches are drawn as they are needed, four to a step."""

import argparse

import torch
from torch import nn

ACCUMULATE = 4


def drawn(batches, size=32, points=24):
    time = torch.linspace(0, 1, points)
    for _ in range(batches):
        slope = torch.randn(size, 1)
        curves = slope * time + 0.3 * torch.randn(size, points)
        yield curves, (slope > 0).float()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--steps", type=int, default=0, help="of an epoch; 0: all")
    args = parser.parse_args()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for epoch in range(args.epochs):
        for i, (curves, wanted) in enumerate(drawn(40)):
            loss = ((torch.sigmoid(model(curves)) - wanted) ** 2).mean()
            loss.backward()  # <- here
            if (i + 1) % ACCUMULATE == 0:
                optimizer.step()
                optimizer.zero_grad()
            if i + 1 == ACCUMULATE * args.steps:
                break
        print(f"epoch {epoch}: last loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
