"""A deep, narrow network on two ranks: torchrun --nproc-per-node 2 SCRIPT."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.dense = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x):
        return x + torch.relu(self.dense(self.norm(x)))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=0, help="of an epoch; 0: all")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    x = torch.randn(2048, 32)
    y = x.square().sum(1, keepdim=True).sqrt()
    model = nn.Sequential(*[Block(32) for _ in range(60)], nn.Linear(32, 1))
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.Adam(ddp.parameters(), lr=1e-3, fused=True)
    for epoch in range(args.epochs):
        total = torch.zeros(())
        order = torch.randperm(len(x))[rank::ranks]
        for step, rows in enumerate(order.split(32), 1):
            guess = ddp(x.index_select(0, rows))
            loss = nn.functional.mse_loss(guess, y.index_select(0, rows))
            optimizer.zero_grad()
            loss.backward()
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
