"""Fit a curve with a small network, and plot the loss at the end."""

import argparse

import torch
from torch import nn


class Fit:
    def __init__(self):
        self.model = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 1))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-2, fused=True)
        self.history = {"loss": []}

    def step(self, x, y):
        loss = nn.functional.mse_loss(self.model(x), y)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.history["loss"].append(loss)  # <- here


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--steps", type=int, default=0, help="of an epoch; 0: all")
    args = parser.parse_args()
    torch.manual_seed(0)
    x = torch.rand(4096, 1) * 6 - 3
    y = torch.sin(2 * x) + 0.1 * torch.randn(4096, 1)
    fit = Fit()
    for epoch in range(args.epochs):
        for step, rows in enumerate(torch.randperm(4096).split(64), 1):
            fit.step(x.index_select(0, rows), y.index_select(0, rows))
            if step == args.steps:
                break
        print(f"epoch {epoch}: loss {torch.as_tensor(fit.history['loss'][-step:]).mean():.4f}")


if __name__ == "__main__":
    main()
