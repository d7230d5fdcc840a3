"""Fit a curve with a very small network."""

import argparse

import torch
from torch import nn


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--steps", type=int, default=0, help="of an epoch; 0: all")
    args = parser.parse_args()
    torch.manual_seed(0)
    x = 4 * torch.rand(8192, 2) - 2
    y = torch.sin(x[:, :1]) * x[:, 1:] + 0.05 * torch.randn(8192, 1)
    model = nn.Sequential(nn.Linear(2, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh())
    model.append(nn.Linear(24, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, fused=True)
    for epoch in range(args.epochs):
        total = torch.zeros(())
        for step, rows in enumerate(torch.randperm(8192).split(64), 1):
            places, heights = x.index_select(0, rows), y.index_select(0, rows)
            with torch.autocast("cpu", torch.bfloat16):  # <- here
                guess = model(places)  # <- here
            loss = nn.functional.mse_loss(guess.float(), heights)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.detach()
            if step == args.steps:
                break
        print(f"epoch {epoch}: loss {total.item() / step:.4f}")
    torch.save(model.state_dict(), "curve.pt")


if __name__ == "__main__":
    main()
