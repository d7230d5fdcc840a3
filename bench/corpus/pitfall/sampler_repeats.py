"""Tell two kinds of measurements apart, with an order that can be repeated."""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, Sampler, TensorDataset


class Seeded(Sampler):
    """Draws an order by its seed and the epoch."""

    def __init__(self, length, seed=0):
        self.length, self.seed, self.epoch = length, seed, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return self.length

    def __iter__(self):
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        return iter(torch.randperm(self.length, generator=generator).tolist())


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--steps", type=int, default=0, help="of an epoch; 0: all")
    args = parser.parse_args()
    torch.manual_seed(0)
    x = torch.randn(160, 12)
    y = (x[:, :4].sum(1) > 0).long()
    sampler = Seeded(len(x))
    loader = DataLoader(TensorDataset(x, y), batch_size=16, sampler=sampler)
    model = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(args.epochs):
        for step, (rows, kinds) in enumerate(loader, 1):  # <- here
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(rows), kinds)
            loss.backward()
            optimizer.step()
            if step == args.steps:
                break
        print(f"epoch {epoch}: last loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
