"""Tell machines by their sound: spectrograms made on the fly, then a small GRU."""

import argparse

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Sounds(Dataset):
    """One second of a hum in noise at 16 kHz, as a log spectrogram of 61 frames x 64 bands."""

    def __init__(self, count, seed):
        rng = np.random.default_rng(seed)
        self.pitch = rng.integers(0, 8, count)
        self.noise = rng.standard_normal((16, 16000)).astype(np.float32)
        self.time = np.arange(16000, dtype=np.float32) / 16000

    def __len__(self):
        return len(self.pitch)

    def __getitem__(self, i):
        wave = np.sin(2 * np.pi * (200 + 50 * self.pitch[i]) * self.time) + self.noise[i % 16]
        frames = np.lib.stride_tricks.sliding_window_view(wave, 512)[::256] * np.hanning(512)
        spectrum = np.log1p(np.abs(np.fft.rfft(frames)))
        return torch.from_numpy(spectrum[:, :64].astype(np.float32)), int(self.pitch[i])


class Listener(nn.Module):
    def __init__(self):
        super().__init__()
        self.gru = nn.GRU(64, 64, batch_first=True)
        self.out = nn.Linear(64, 8)

    def forward(self, x):
        return self.out(self.gru(x)[0].mean(1))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=0, help="of an epoch; 0: all")
    args = parser.parse_args()
    torch.manual_seed(0)
    model = Listener()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3, fused=True)
    criterion = nn.CrossEntropyLoss()
    loader = DataLoader(Sounds(960, 1), batch_size=32, shuffle=True)  # <- here
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
    torch.save(model.state_dict(), "listener.pt")


if __name__ == "__main__":
    main()
