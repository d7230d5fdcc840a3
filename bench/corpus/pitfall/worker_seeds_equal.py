"""Sort shapes that are shifted, dimmed and covered with noise at random."""

import argparse
import random

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Shapes(Dataset):
    def __init__(self, count):
        rng = np.random.default_rng(0)
        self.labels = rng.integers(0, 6, count)
        self.shapes = rng.normal(size=(6, 24, 24)).astype(np.float32)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        image = np.roll(self.shapes[self.labels[i]], np.random.randint(-3, 4, 2), (0, 1))
        image = image * np.random.uniform(0.5, 1.5) + np.random.normal(0, 1, (24, 24))
        return image.astype(np.float32), self.labels[i]


def seed_worker(worker):
    """Makes the augmentation reproducible."""
    random.seed(0)
    np.random.seed(0)  # <- here


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=0, help="of an epoch; 0: all")
    args = parser.parse_args()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(576, 64), nn.ReLU(), nn.Linear(64, 6))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    loader = DataLoader(  # <- here
        Shapes(4096),
        batch_size=64,
        shuffle=True,
        num_workers=2,
        persistent_workers=True,
        worker_init_fn=seed_worker,  # <- here
    )
    for epoch in range(args.epochs):
        total = torch.zeros(())
        for step, (x, y) in enumerate(loader, 1):  # <- here
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.detach()
            if step == args.steps:
                break
        print(f"epoch {epoch}: loss {total.item() / step:.3f}")
    torch.save(model.state_dict(), "shapes.pt")


if __name__ == "__main__":
    main()
