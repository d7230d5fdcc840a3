"""Sort heart beats: recordings of a sensor, as it has left them in a folder."""

import argparse
import tempfile
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

BEATS, LENGTH = 4096, 180


def record(folder):
    """Stands for the sensor: a file for each beat, and all of them in one file."""
    rng = np.random.default_rng(0)
    kinds = rng.integers(0, 4, BEATS)
    time = np.linspace(0, 1, LENGTH)
    beats = np.sin(2 * np.pi * (kinds + 1)[:, None] * time) + rng.normal(0, 0.5, (BEATS, LENGTH))
    for i, beat in enumerate(beats.astype(np.float32)):
        np.save(folder / f"beat_{i:05d}.npy", beat)
    np.save(folder / "beats.npy", beats.astype(np.float32))
    np.save(folder / "kinds.npy", kinds)


class Beats(Dataset):
    def __init__(self, folder):
        self.folder, self.kinds = folder, np.load(folder / "kinds.npy")

    def __len__(self):
        return len(self.kinds)

    def __getitem__(self, i):
        return np.load(self.folder / f"beat_{i:05d}.npy"), self.kinds[i]  # <- here


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--steps", type=int, default=0, help="of an epoch; 0: all")
    args = parser.parse_args()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(LENGTH, 64), nn.ReLU(), nn.Linear(64, 4))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    with tempfile.TemporaryDirectory() as folder:
        record(Path(folder))
        loader = DataLoader(Beats(Path(folder)), batch_size=64, shuffle=True)
        for epoch in range(args.epochs):
            total = 0.0
            for step, (x, y) in enumerate(loader, 1):
                loss = nn.functional.cross_entropy(model(x), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                total += float(loss.detach())
                if step == args.steps:
                    break
            print(f"epoch {epoch}: loss {total / step:.3f}")


if __name__ == "__main__":
    main()
