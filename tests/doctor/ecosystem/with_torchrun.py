"""Trains a small network on the ranks of torchrun; --wrong for mistakes, which are marked."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

WRONG = "--wrong" in sys.argv


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    x = torch.randn(2048, 16)
    y = x[:, :4].sum(1, keepdim=True) + 0.1 * torch.randn(2048, 1)
    rows = TensorDataset(x, y)
    sampler = None if WRONG else DistributedSampler(rows)
    loader = DataLoader(rows, 32, sampler=sampler)  # wrong: sampler_missing
    model = DistributedDataParallel(nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1)))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for epoch in range(400):
        if sampler is not None:
            sampler.set_epoch(epoch)
        for rows, sums in loader:
            optimizer.zero_grad()
            out = model(rows)
            loss = functional.mse_loss(out, sums[:, 0] if WRONG else sums)  # wrong: loss_broadcast
            loss.backward()
            optimizer.step()
    if dist.get_rank() == 0:
        torch.save(model.module.state_dict(), "model.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
