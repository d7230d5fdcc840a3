"""Tell bright photos from dark ones: JPEG files in a folder, resized to 64x64."""

import argparse
import tempfile
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, Dataset


def make_photos(folder, count):
    """Stands for the photos that a user has: smooth colors, 320x240."""
    rng = np.random.default_rng(0)
    for i in range(count):
        small = rng.integers(0, 128, (6, 8, 3)) + 127 * (i % 2)
        photo = Image.fromarray(small.astype(np.uint8)).resize((320, 240), Image.Resampling.BICUBIC)
        photo.save(folder / f"{i:04d}_{i % 2}.jpg", quality=90)


class Photos(Dataset):
    def __init__(self, folder):
        self.files = sorted(folder.glob("*.jpg"))

    def __len__(self):
        return len(self.files)

    def decode(self, file):
        image = Image.open(file).resize((64, 64))  # <- here
        return torch.from_numpy(np.array(image)).permute(2, 0, 1)

    def __getitem__(self, i):
        pixels = self.decode(self.files[i])  # <- here
        return pixels, int(self.files[i].stem[-1])


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--steps", type=int, default=0, help="of an epoch; 0: all")
    args = parser.parse_args()
    torch.manual_seed(0)
    model = nn.Sequential(nn.AvgPool2d(8), nn.Flatten(), nn.Linear(192, 32), nn.ReLU())
    model.append(nn.Linear(32, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, fused=True)
    with tempfile.TemporaryDirectory() as folder:
        make_photos(Path(folder), 512)
        loader = DataLoader(Photos(Path(folder)), batch_size=32, shuffle=True)
        for epoch in range(args.epochs):
            total = 0.0
            for step, (x, y) in enumerate(loader, 1):
                loss = nn.functional.cross_entropy(model(x / 255), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                total += float(loss.detach())
                if step == args.steps:
                    break
            print(f"epoch {epoch}: loss {total / step:.3f}")


if __name__ == "__main__":
    main()
