"""Forecast a load from the day before, by windows of a series."""

import argparse

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Windows(Dataset):
    def __init__(self, series, before, ahead):
        self.series = torch.tensor(series, dtype=torch.float32)
        self.before, self.ahead = before, ahead

    def __len__(self):
        return len(self.series) - self.before - self.ahead + 1

    def __getitem__(self, at):
        now = at + self.before
        return self.series[at:now], self.series[now : now + self.ahead, 0]


def load(hours):
    rng, time = np.random.default_rng(0), np.arange(hours)
    warmth = 10 + 0.002 * time + 6 * np.sin(2 * np.pi * time / 24) + rng.normal(size=hours)
    return np.stack([400 + 0.03 * time - 5 * warmth + rng.normal(size=hours), warmth], 1)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--steps", type=int, default=0, help="of an epoch; 0: all")
    args = parser.parse_args()
    torch.manual_seed(0)
    series = load(6000)
    series = (series - series.mean(0)) / series.std(0)
    train, held_out = Windows(series[:4200], 24, 6), Windows(series[4200:5100], 24, 6)
    loader, others = DataLoader(train, 64, shuffle=True), DataLoader(held_out, 128)
    model = nn.Sequential(nn.Flatten(), nn.Linear(48, 64), nn.ReLU(), nn.Linear(64, 6))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    for epoch in range(args.epochs):
        model.train()
        for step, (window, wanted) in enumerate(loader, 1):
            loss = nn.functional.mse_loss(model(window), wanted)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step in (16, args.steps):
                break
        model.eval()
        with torch.no_grad():
            off = [nn.functional.mse_loss(model(x), y).item() for x, y in others]  # <- here
        print(f"epoch {epoch}: off by {np.mean(off):.4f}")


if __name__ == "__main__":
    main()
