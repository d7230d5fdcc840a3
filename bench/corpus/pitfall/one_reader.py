"""Find faults in bearings: windows of vibration that a logger has left as compressed bytes."""

import argparse
import gzip
import tempfile
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

PARTS = 1  # <- here
BATCHES, BATCH, WINDOW = 24, 32, 3 * 65536


def record(folder):
    """Stands for the logger: a byte that says what was wrong, then the window."""
    rng = np.random.default_rng(0)
    files = [folder / f"bearings-{part}.gz" for part in range(PARTS)]
    for i in range(BATCHES):
        batch = rng.integers(0, 8, (BATCH, WINDOW), dtype=np.uint8)
        batch[:, ::192] += 8 * (np.arange(BATCH, dtype=np.uint8) % 4)[:, None]
        kinds = np.arange(BATCH, dtype=np.uint8)[:, None] % 4
        with files[i % PARTS].open("ab") as log:
            log.write(gzip.compress(np.concatenate([kinds, batch], axis=1).tobytes(), 1))
    return files


class Windows(IterableDataset):
    """Each worker reads its own files."""

    def __init__(self, files):
        self.files = files

    def __iter__(self):
        worker = get_worker_info()
        for file in self.files[worker.id :: worker.num_workers]:
            with gzip.open(file) as log:
                while window := log.read(1 + WINDOW):  # <- here
                    yield torch.tensor(list(window[1::192])) / 8, window[0]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--steps", type=int, default=0, help="of an epoch; 0: all")
    args = parser.parse_args()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WINDOW // 192, 32), nn.ReLU(), nn.Linear(32, 4))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    with tempfile.TemporaryDirectory() as folder:
        data = Windows(record(Path(folder)))
        loader = DataLoader(data, BATCH, num_workers=PARTS, persistent_workers=True)
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
