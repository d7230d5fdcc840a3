"""Count blobs in noisy pictures that are drawn on the fly."""

import argparse

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Blobs(Dataset):
    def __init__(self, count, seed):
        self.count, self.seed = count, seed
        self.y, self.x = np.mgrid[0:64, 0:64].astype(np.float32)

    def __len__(self):
        return self.count

    def __getitem__(self, i):
        rng = np.random.default_rng((self.seed, i))
        blobs = int(rng.integers(1, 6))
        image = rng.normal(0, 0.1, (64, 64)).astype(np.float32)
        for x, y in rng.uniform(8, 56, (blobs, 2)):
            image += np.exp(-((self.x - x) ** 2 + (self.y - y) ** 2) / 18)
        return image[None, ::4, ::4].copy(), blobs - 1


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=0, help="of an epoch; 0: all")
    args = parser.parse_args()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 5))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    criterion = nn.CrossEntropyLoss()
    loader = DataLoader(  # <- here
        Blobs(4096, 0),
        batch_size=64,
        shuffle=True,
        num_workers=24,  # <- here
        persistent_workers=True,
    )
    for epoch in range(args.epochs):
        total = 0.0
        for step, (x, y) in enumerate(loader, 1):  # <- here
            loss = criterion(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += float(loss.detach())
            if step == args.steps:
                break
        print(f"epoch {epoch}: loss {total / step:.3f}")


if __name__ == "__main__":
    main()
