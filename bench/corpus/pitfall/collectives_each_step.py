"""A deep network on two ranks, with a loop of its own: torchrun --nproc-per-node 2 SCRIPT."""

import argparse

import torch
import torch.distributed as dist
from torch import nn


def average(model):
    ranks = dist.get_world_size()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)  # <- here
        parameter.grad /= ranks


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--steps", type=int, default=0, help="of an epoch; 0: all")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    y = torch.randint(10, (5120,))
    x = torch.randn(10, 64)[y] + torch.randn(5120, 64)
    layers = [module for _ in range(12) for module in (nn.Linear(64, 64), nn.ReLU())]
    model = nn.Sequential(*layers, nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, fused=True)
    for epoch in range(args.epochs):
        total = torch.zeros(())
        order = torch.randperm(len(x))[rank::ranks]
        for step, rows in enumerate(order.split(64), 1):
            optimizer.zero_grad()
            score = model(x.index_select(0, rows))
            loss = nn.functional.cross_entropy(score, y.index_select(0, rows))
            loss.backward()
            average(model)
            optimizer.step()
            total += loss.detach()
            if step == args.steps:
                break
        if rank == 0:
            print(f"epoch {epoch}: loss {total.item() / step:.3f}")
    if rank == 0:
        torch.save(model.state_dict(), "deep.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
