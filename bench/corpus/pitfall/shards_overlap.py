"""Digits of 8x8 pixels on two ranks: torchrun --nproc-per-node 2 SCRIPT."""

import argparse

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Sampler, TensorDataset


class RankSampler(Sampler):
    def __init__(self, length):
        self.length, self.epoch = length, 0
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()

    def __len__(self):
        return self.length // self.ranks

    def __iter__(self):
        seed = 1000 * self.epoch + self.rank
        order = torch.randperm(self.length, generator=torch.Generator().manual_seed(seed))
        yield from order[self.rank :: self.ranks][: len(self)].tolist()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=0, help="of an epoch; 0: all")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    pixels, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(labels))
    sampler = RankSampler(len(data))
    loader = DataLoader(data, batch_size=32, sampler=sampler)  # <- here
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.Adam(ddp.parameters(), lr=1e-3, fused=True)
    for epoch in range(args.epochs):
        sampler.epoch = epoch
        for step, (x, y) in enumerate(loader, 1):  # <- here
            loss = nn.functional.cross_entropy(ddp(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step == args.steps:
                break
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {loss.item():.3f}")
    if dist.get_rank() == 0:
        torch.save(model.state_dict(), "digits.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
