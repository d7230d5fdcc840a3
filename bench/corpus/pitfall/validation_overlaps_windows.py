"""Foretell the next hour of a noisy daily cycle from two days of it."""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split


class Forecast(nn.Module):
    def __init__(self):
        super().__init__()
        self.memory = nn.GRU(1, 32, batch_first=True)
        self.out = nn.Linear(32, 1)

    def forward(self, x):
        return self.out(self.memory(x)[0][:, -1]).squeeze(1)


def windows(series, length=48):
    x = series.unfold(0, length, 1)[:-1, :, None].contiguous()
    return TensorDataset(x, series[length:])


def split(series):
    return random_split(windows(series), [0.8, 0.2])


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--steps", type=int, default=0, help="of an epoch; 0: all")
    args = parser.parse_args()
    torch.manual_seed(0)
    hours = torch.arange(2000)
    series = torch.sin(hours * torch.pi / 12) + 0.5 * torch.randn(2000)
    train, held = split(series)
    model = Forecast()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, fused=True)
    for epoch in range(args.epochs):
        for step, (x, y) in enumerate(DataLoader(train, 128, shuffle=True), 1):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            if step == args.steps:
                break
        off = 0.0
        with torch.no_grad():
            for x, y in DataLoader(held, 256):  # <- here
                off += nn.functional.mse_loss(model(x), y, reduction="sum").item()
        print(f"epoch {epoch}: held out {off / len(held):.3f}")


if __name__ == "__main__":
    main()
