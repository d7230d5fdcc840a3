"""Denoise short signals: clean ones are known, noise is added on the fly."""

import argparse

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Signals(Dataset):
    def __init__(self, count):
        phase = np.linspace(0, 6.28, count, dtype=np.float32)[:, None]
        self.clean = np.sin(np.arange(128, dtype=np.float32) / 8 + phase)
        self.rng = np.random.default_rng(0)

    def __len__(self):
        return len(self.clean)

    def __getitem__(self, i):
        noise = self.rng.normal(0, 0.5, 128).astype(np.float32)  # <- here
        return self.clean[i] + noise, self.clean[i]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=0, help="of an epoch; 0: all")
    args = parser.parse_args()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 128))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    loader = DataLoader(  # <- here
        Signals(4096),
        batch_size=64,
        shuffle=True,
        num_workers=2,
        persistent_workers=True,
    )
    for epoch in range(args.epochs):
        total = torch.zeros(())
        for step, (noisy, clean) in enumerate(loader, 1):  # <- here
            loss = nn.functional.mse_loss(model(noisy), clean)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.detach()
            if step == args.steps:
                break
        print(f"epoch {epoch}: loss {total.item() / step:.4f}")
    torch.save(model.state_dict(), "denoiser.pt")


if __name__ == "__main__":
    main()
