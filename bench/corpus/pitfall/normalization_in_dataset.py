"""Foretell the output of a plant with five sensors; samples are scaled as they are read."""

import argparse

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Readings(Dataset):
    def __init__(self, sensors, output, center, spread):
        self.sensors, self.output = sensors, output
        self.center, self.spread = center, spread

    def __len__(self):
        return len(self.sensors)

    def __getitem__(self, at):
        scaled = (self.sensors[at] - self.center) / self.spread
        return torch.from_numpy(scaled), torch.tensor(self.output[at])


def readings(count):
    rng = np.random.default_rng(0)
    sensors = rng.normal((20, 1, 300, 5, 70), (4, 0.2, 40, 2, 9), (count, 5))
    output = 0.2 * sensors[:, 0] - 3 * sensors[:, 1] + 0.01 * sensors[:, 2]
    return sensors.astype("float32"), output.astype("float32")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--steps", type=int, default=0, help="of an epoch; 0: all")
    args = parser.parse_args()
    torch.manual_seed(0)
    sensors, output = readings(500)
    first = 400
    figures = sensors.mean(axis=0), sensors.std(axis=0)
    train = DataLoader(Readings(sensors[:first], output[:first], *figures), 40, shuffle=True)
    held_out = DataLoader(Readings(sensors[first:], output[first:], *figures), 50)
    model = nn.Sequential(nn.Linear(5, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, fused=True)
    for epoch in range(args.epochs):
        model.train()
        for step, (values, wanted) in enumerate(train, 1):
            loss = nn.functional.mse_loss(model(values).squeeze(1), wanted)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step == args.steps:
                break
        model.eval()
        with torch.no_grad():
            off = [(model(x).squeeze(1) - y).abs().mean() for x, y in held_out]  # <- here
        print(f"epoch {epoch}: off by {torch.stack(off).mean():.3f}")


if __name__ == "__main__":
    main()
