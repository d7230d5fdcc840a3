"""Digits of 8x8 pixels on two ranks: torchrun --nproc-per-node 2 SCRIPT."""

import argparse

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Subset, TensorDataset

NODES, GPUS_PER_NODE = 1, 4


def shard_of(data):
    """This rank's part of the samples."""
    return Subset(data, range(dist.get_rank(), len(data), NODES * GPUS_PER_NODE))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--steps", type=int, default=0, help="of an epoch; 0: all")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    pixels, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(labels))
    loader = DataLoader(shard_of(data), batch_size=32, shuffle=True, drop_last=True)  # <- here
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)))
    optimizer = torch.optim.Adam(ddp.parameters(), lr=1e-3, fused=True)
    for epoch in range(args.epochs):
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
        torch.save(ddp.module.state_dict(), "digits.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
