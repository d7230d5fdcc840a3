"""Sort long feature vectors that lie in memory, with a linear model."""

import argparse

import torch
from torch import nn


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--steps", type=int, default=0, help="of an epoch; 0: all")
    args = parser.parse_args()
    torch.manual_seed(0)
    y = torch.randint(4, (60_000,))
    x = torch.randn(60_000, 256) + 0.2 * torch.randn(4, 256)[y]
    model = nn.Linear(256, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    for epoch in range(args.epochs):
        total = torch.zeros(())
        for step, rows in enumerate(torch.randperm(50_000).split(512), 1):
            features, kinds = x[rows], y[rows]  # <- here
            loss = nn.functional.cross_entropy(model(features), kinds)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.detach()
            if step == args.steps:
                break
        with torch.no_grad():
            right = (model(x[50_000:]).argmax(1) == y[50_000:]).float().mean().item()
        print(f"epoch {epoch}: loss {total.item() / step:.3f}, held out {right:.1%}")
    torch.save(model.state_dict(), "linear.pt")


if __name__ == "__main__":
    main()
