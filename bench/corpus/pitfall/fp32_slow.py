"""Sort pictures of 28x28 with wide dense layers."""

import argparse

import torch
from torch import nn


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=0, help="of an epoch; 0: all")
    args = parser.parse_args()
    torch.manual_seed(0)
    y = torch.randint(10, (6144,))
    x = torch.randn(10, 784)[y] + 2 * torch.randn(6144, 784)
    model = nn.Sequential(nn.Linear(784, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU())
    model.append(nn.Linear(2048, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, fused=True)
    for epoch in range(args.epochs):
        total = torch.zeros(())
        for step, rows in enumerate(torch.randperm(5120).split(256), 1):
            images, labels = x.index_select(0, rows), y.index_select(0, rows)
            loss = nn.functional.cross_entropy(model(images), labels)  # <- here
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.detach()
            if step == args.steps:
                break
        with torch.no_grad():
            right = (model(x[5120:]).argmax(1) == y[5120:]).float().mean().item()
        print(f"epoch {epoch}: loss {total.item() / step:.3f}, held out {right:.1%}")
    torch.save(model.state_dict(), "wide.pt")


if __name__ == "__main__":
    main()
