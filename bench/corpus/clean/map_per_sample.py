"""Predict the price of a house from a table of numbers, each scaled to its column."""

import argparse

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

COLUMNS = 40


class Houses(Dataset):
    def __init__(self, count, seed):
        rng = np.random.default_rng(seed)
        self.rows = rng.lognormal(1.0, 0.5, (count, COLUMNS)).astype(np.float32)
        self.prices = (np.log(self.rows) @ rng.normal(size=COLUMNS)).astype(np.float32)
        self.mean, self.std = np.log(self.rows).mean(0), np.log(self.rows).std(0)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        columns = zip(self.rows[i], self.mean, self.std, strict=True)
        row = [(np.log(value) - mean) / std for value, mean, std in columns]
        return torch.tensor(row), self.prices[i]

    def __getitems__(self, indices):
        rows = (np.log(self.rows[indices]) - self.mean) / self.std
        return torch.from_numpy(rows), torch.from_numpy(self.prices[indices])


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=0, help="of an epoch; 0: all")
    args = parser.parse_args()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(COLUMNS, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    loader = DataLoader(Houses(16384, 0), batch_size=128, shuffle=True, collate_fn=lambda b: b)
    for epoch in range(args.epochs):
        total = 0.0
        for step, (x, y) in enumerate(loader, 1):
            loss = nn.functional.mse_loss(model(x).squeeze(1), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += float(loss.detach())
            if step == args.steps:
                break
        print(f"epoch {epoch}: loss {total / step:.3f}")
    torch.save(model.state_dict(), "prices.pt")


if __name__ == "__main__":
    main()
