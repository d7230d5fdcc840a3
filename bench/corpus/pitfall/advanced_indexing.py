"""Sort pictures of 28x28 that lie in memory as bytes, with a linear model."""

import argparse

import torch
from torch import nn


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--steps", type=int, default=0, help="of an epoch; 0: all")
    args = parser.parse_args()
    torch.manual_seed(0)
    y = torch.randint(4, (20_000,))
    x = (torch.randint(256, (4, 784))[y] + torch.randint(256, (20_000, 784))).div(2).byte()
    model = nn.Linear(784, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, fused=True)
    for epoch in range(args.epochs):
        total = torch.zeros(())
        for step, rows in enumerate(torch.randperm(16_000).split(512), 1):
            images, kinds = x[rows], y[rows]  # <- here
            loss = nn.functional.cross_entropy(model(images / 255), kinds)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.detach()
            if step == args.steps:
                break
        with torch.no_grad():
            right = (model(x[16_000:] / 255).argmax(1) == y[16_000:]).float().mean().item()
        print(f"epoch {epoch}: loss {total.item() / step:.3f}, held out {right:.1%}")
    torch.save(model.state_dict(), "linear.pt")


if __name__ == "__main__":
    main()
