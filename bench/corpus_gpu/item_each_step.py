"""Fit a deep, narrow network, and read its loss in each step."""

import argparse

import torch
from torch import nn


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=20)
    args = parser.parse_args()
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x = torch.randn(65_536, 256, device=device)
    y = x[:, :1].sin() + x[:, 1:2]
    layers = [nn.Sequential(nn.Linear(1024, 1024), nn.GELU()) for _ in range(6)]
    model = nn.Sequential(nn.Linear(256, 1024), *layers, nn.Linear(1024, 1)).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    for epoch in range(args.epochs):
        total = 0.0
        for rows in torch.randperm(len(x), device=device).split(1024):
            loss = nn.functional.mse_loss(model(x[rows]), y[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item()
        print(f"epoch {epoch}: loss {total / 64:.4f}")


if __name__ == "__main__":
    main()
