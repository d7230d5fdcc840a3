"""A wide network, its optimizer's state shared out to ranks: torchrun --nproc-per-node 2 SCRIPT."""

import argparse
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import nn


def share_out(parameters, ranks):
    """Which rank steps which parameters."""
    return [parameters[at::ranks] for at in range(ranks)]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--steps", type=int, default=0, help="of an epoch; 0: all")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    x = torch.randn(1024, 1024)
    y = (x[:, :8] > 0).long().sum(1)
    widths = [1024] * 7 + [64] * 6 + [9]
    layers = [nn.Linear(a, b, bias=False) for a, b in pairwise(widths)]
    model = nn.Sequential(*[part for layer in layers for part in (layer, nn.ReLU())][:-1])
    parts = share_out(list(model.parameters()), dist.get_world_size())
    mine = torch.arange(dist.get_rank(), len(x), dist.get_world_size())
    optimizer = torch.optim.Adam(parts[dist.get_rank()], lr=1e-3, fused=True)
    for epoch in range(args.epochs):
        for step, rows in enumerate(mine.index_select(0, torch.randperm(len(mine))).split(16), 1):
            loss = nn.functional.cross_entropy(
                model(x.index_select(0, rows)), y.index_select(0, rows)
            )
            model.zero_grad()
            loss.backward()
            for value in model.parameters():
                dist.all_reduce(value.grad)
            optimizer.step()
            for owner, part in enumerate(parts):
                for value in part:
                    dist.broadcast(value.data, owner)
            if step == args.steps:
                break
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: last loss {loss.item():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
