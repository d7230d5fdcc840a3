"""A generator and its judge, on points of a ring."""

import argparse
import math

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits as tells


def network(given, made):
    return nn.Sequential(nn.Linear(given, 64), nn.ReLU(), nn.Linear(64, made))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--steps", type=int, default=0, help="of an epoch; 0: all")
    args = parser.parse_args()
    torch.manual_seed(0)
    maker, judge = network(8, 2), network(2, 1)
    make = torch.optim.Adam(maker.parameters(), lr=1e-3)
    tell = torch.optim.Adam(judge.parameters(), lr=1e-3)
    ones, zeros = torch.ones(64, 1), torch.zeros(64, 1)
    for epoch in range(args.epochs):
        for step in range(1, 51):
            angle = 2 * math.pi * torch.rand(64)
            real = torch.stack([angle.cos(), angle.sin()], 1)
            with torch.no_grad():
                made = maker(torch.randn(64, 8))
            tell.zero_grad()
            (tells(judge(real), ones) + tells(judge(made), zeros)).backward()
            tell.step()
            make.zero_grad()
            loss = tells(judge(made), ones)
            loss.backward()
            make.step()  # <- here
            if step == args.steps:
                break
        print(f"epoch {epoch}: last loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
