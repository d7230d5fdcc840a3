"""Tell signals apart, and keep an average of the weights for the validation."""

import argparse
import copy

import torch
from torch import nn


def signals(count):
    kinds = torch.randint(4, (count,))
    waves = torch.sin(torch.arange(64) * (1 + kinds[:, None]) / 7)
    return waves + torch.randn(count, 64), kinds


def averaged(average, model, decay=0.99):
    fresh = copy.deepcopy(model)  # <- here
    with torch.no_grad():
        for kept, new in zip(average.parameters(), fresh.parameters(), strict=True):
            new.copy_(kept.lerp(new, 1 - decay))
    return fresh


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--steps", type=int, default=0, help="of an epoch; 0: all")
    args = parser.parse_args()
    torch.manual_seed(0)
    (x, y), (held_x, held_y) = signals(8192), signals(1024)
    layers = [part for _ in range(6) for part in (nn.Linear(64, 64), nn.LayerNorm(64), nn.ReLU())]
    model = nn.Sequential(*layers, nn.Linear(64, 4))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    average = copy.deepcopy(model)
    for epoch in range(args.epochs):
        for step, rows in enumerate(torch.randperm(len(x)).split(128), 1):
            loss = nn.functional.cross_entropy(
                model(x.index_select(0, rows)), y.index_select(0, rows)
            )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            average = averaged(average, model)
            if step == args.steps:
                break
        average.eval()
        with torch.no_grad():
            right = (average(held_x).argmax(1) == held_y).float().mean().item()
        print(f"epoch {epoch}: last loss {loss.item():.3f}, {right:.1%} right")


if __name__ == "__main__":
    main()
