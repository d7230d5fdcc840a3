"""Sort small pictures with a convolutional network."""

import argparse

import torch
from torch import nn


def network():
    layers = []
    for inside, outside in ((3, 32), (32, 64), (64, 64)):
        layers += [nn.Conv2d(inside, outside, 3, padding=1), nn.MaxPool2d(2), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(64 * 16, 10))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=0, help="of an epoch; 0: all")
    args = parser.parse_args()
    torch.manual_seed(0)
    y = torch.randint(10, (1280,))
    x = torch.rand(10, 3, 32, 32)[y] + torch.rand(1280, 3, 32, 32)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, fused=True)
    for epoch in range(args.epochs):
        total = torch.zeros(())
        for step, rows in enumerate(torch.randperm(1024).split(64), 1):
            score = model(x.index_select(0, rows))  # <- here
            loss = nn.functional.cross_entropy(score, y.index_select(0, rows))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.detach()
            if step == args.steps:
                break
        with torch.no_grad():
            right = (model(x[1024:]).argmax(1) == y[1024:]).float().mean().item()
        print(f"epoch {epoch}: loss {total.item() / step:.3f}, held out {right:.1%}")
    torch.save(model.state_dict(), "pictures.pt")


if __name__ == "__main__":
    main()
