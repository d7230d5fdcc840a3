"""Learn the seasons of a large map: patches are made from their place and kept in memory."""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

PATCHES, SIDE = 64_000_000, 128


class Patches(Dataset):
    """Patches of a map of 4 TB, numbered in random order."""

    def __init__(self):
        self.cache = {}

    def __len__(self):
        return PATCHES

    def __getitem__(self, i):  # <- here
        patch = self.cache.get(i)
        if patch is None:
            generator = torch.Generator().manual_seed(i)
            patch = torch.randn(SIDE * SIDE, generator=generator) + (i % 4) / 8
            self.cache[i] = patch  # <- here
        return patch, i % 4


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--steps", type=int, default=1500, help="of an epoch")
    args = parser.parse_args()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(SIDE * SIDE, 256), nn.ReLU(), nn.Linear(256, 4))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, fused=True)
    loader = DataLoader(Patches(), batch_size=4)
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
