"""Guess what flats are let for; tables of pandas become tensors once."""

import argparse

import numpy as np
import pandas as pd
import torch
from torch import nn

COLUMNS = ["area", "rooms", "floor", "year", "distance"]


def flats(count):
    rng = np.random.default_rng(0)
    area = rng.gamma(6, 12, count).round(1) + 15
    frame = pd.DataFrame({"area": area, "rooms": (area // 28 + rng.integers(1, 3, count))})
    frame["floor"] = rng.integers(0, 9, count)
    frame["year"] = rng.integers(1900, 2024, count)
    frame["distance"] = rng.exponential(4, count).round(1)
    frame["rent"] = 6 + 0.011 * area - 0.004 * frame.distance + rng.normal(0, 0.1, count)
    return frame


def tensors(frame):
    values = torch.tensor(frame[COLUMNS].values, dtype=torch.float32)
    return values / torch.tensor([100.0, 5.0, 10.0, 2000.0, 10.0]), torch.tensor(
        frame["rent"].values, dtype=torch.float32
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--steps", type=int, default=0, help="of an epoch; 0: all")
    args = parser.parse_args()
    torch.manual_seed(0)
    frame = flats(600)
    train = frame.sample(frac=0.8, random_state=0)
    held_out = frame.sample(frac=0.2, random_state=1)
    (x, rent), (other_x, other_rent) = tensors(train), tensors(held_out)
    model = nn.Sequential(nn.Linear(5, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, fused=True)
    for epoch in range(args.epochs):
        model.train()
        for step, rows in enumerate(torch.randperm(len(x)).split(48), 1):
            loss = nn.functional.mse_loss(model(x[rows]).squeeze(1), rent[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step == args.steps:
                break
        model.eval()
        with torch.no_grad():
            error = (model(other_x).squeeze(1) - other_rent).abs().mean()  # <- here
        print(f"epoch {epoch}: off by {error:.3f}")


if __name__ == "__main__":
    main()
