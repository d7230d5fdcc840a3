"""Fit a curve; the errors of all samples so far are looked at after each step."""

import argparse
from collections import deque

import torch
from torch import nn


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=0, help="of an epoch; 0: all")
    args = parser.parse_args()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, fused=True)
    for epoch in range(args.epochs):
        errors, worst = deque(), 0.0
        for step in range(1, 501):
            x = torch.rand(256, 1) * 6
            loss = (model(x) - x.sin()).abs()
            optimizer.zero_grad()
            loss.mean().backward()
            optimizer.step()
            errors.extend(loss.flatten().tolist())
            recent = list(errors)  # <- here
            worst = max(recent[-256:])
            if step == args.steps:
                break
        print(f"epoch {epoch}: worst of the last step {worst:.3f}, of {len(errors)} samples")


if __name__ == "__main__":
    main()
