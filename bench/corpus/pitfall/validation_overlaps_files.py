"""Find bright discs in pictures, pixel by pixel."""

import argparse
import tempfile
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Pictures(Dataset):
    def __init__(self, files, flips=False):
        self.files, self.flips = files, flips

    def __len__(self):
        return len(self.files)

    def __getitem__(self, at):
        both = torch.from_numpy(np.load(self.files[at]))
        both = both.flip(2) if self.flips and torch.rand(()) < 0.5 else both
        return both[:1], both[1:]


def draw(folder, count):
    rng, (down, right) = np.random.default_rng(0), np.mgrid[:16, :16]
    for number in range(count):
        y, x, radius = rng.uniform((3, 3, 2), (13, 13, 5))
        mask = ((down - y) ** 2 + (right - x) ** 2 < radius**2).astype("float32")
        picture = mask + rng.normal(0, 0.5, mask.shape).astype("float32")
        np.save(folder / f"{number:04d}.npy", np.stack([picture, mask]))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=0, help="of an epoch; 0: all")
    args = parser.parse_args()
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        draw(Path(folder), 200)
        files = sorted(Path(folder).glob("*.npy"))
        train, held_out = files[:160], files[140:]
        loader = DataLoader(Pictures(train, flips=True), 16, shuffle=True)
        others = DataLoader(Pictures(held_out), 16)
        model = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU())
        model.append(nn.Conv2d(8, 1, 3, padding=1))
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, fused=True)
        for epoch in range(args.epochs):
            model.train()
            for step, (picture, mask) in enumerate(loader, 1):
                loss = nn.functional.binary_cross_entropy_with_logits(model(picture), mask)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                if step == args.steps:
                    break
            model.eval()
            with torch.no_grad():
                right = [((model(x) > 0) == (y > 0)).float().mean() for x, y in others]  # <- here
            print(f"epoch {epoch}: {torch.stack(right).mean():.1%} of the pixels right")


if __name__ == "__main__":
    main()
