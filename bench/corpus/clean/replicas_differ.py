"""Digits on two ranks, gradients averaged by hand: torchrun --nproc-per-node 2 SCRIPT."""

import argparse

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def average_gradients(model):
    flat = torch.cat([value.grad.flatten() for value in model.parameters()])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    sizes = [value.numel() for value in model.parameters()]
    for value, grad in zip(model.parameters(), flat.split(sizes), strict=True):
        value.grad.copy_(grad.view_as(value))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=0, help="of an epoch; 0: all")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    pixels, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(labels))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=32, sampler=sampler)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    for value in model.state_dict().values():
        dist.broadcast(value, 0)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for step, (x, y) in enumerate(loader, 1):
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            average_gradients(model)
            optimizer.step()
            if step == args.steps:
                break
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: last loss {loss.item():.3f}")
    if dist.get_rank() == 0:
        torch.save(model.state_dict(), "digits.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
