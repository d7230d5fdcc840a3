"""Who will click? A log of clicks as text, a small network, several passes."""

import argparse
import tempfile
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

FIELDS = 40


def write_log(folder, rows):
    """Stands for yesterday's log: a line a view, the label first; the same numbers as npy."""
    rng = np.random.default_rng(0)
    values = rng.normal(size=(rows, FIELDS)).round(4).astype(np.float32)
    clicks = (values[:, :3].sum(1) > 1).astype(np.float32)
    table = np.hstack([clicks[:, None], values])
    np.savetxt(folder / "clicks.csv", table, fmt="%.4f", delimiter=",")
    np.save(folder / "clicks.npy", table)


class Log(IterableDataset):
    """Batches of 128 lines."""

    def __init__(self, folder):
        self.folder = folder

    def __iter__(self):
        with open(self.folder / "clicks.csv") as lines:
            batch = []
            for line in lines:
                batch.append([float(field) for field in line.split(",")])  # <- here
                if len(batch) == 128:
                    yield torch.tensor(batch)  # <- here
                    batch = []


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--steps", type=int, default=0, help="of an epoch; 0: all")
    args = parser.parse_args()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(FIELDS, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    with tempfile.TemporaryDirectory() as folder:
        write_log(Path(folder), 16384)
        loader = DataLoader(Log(Path(folder)), batch_size=None)
        for epoch in range(args.epochs):
            total = 0.0
            for step, rows in enumerate(loader, 1):
                score = model(rows[:, 1:]).squeeze(1)
                loss = nn.functional.binary_cross_entropy_with_logits(score, rows[:, 0])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                total += float(loss.detach())
                if step == args.steps:
                    break
            print(f"epoch {epoch}: loss {total / step:.3f}")


if __name__ == "__main__":
    main()
