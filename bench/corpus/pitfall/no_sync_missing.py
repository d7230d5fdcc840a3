"""Large batches in four parts on two ranks: torchrun --nproc-per-node 2 SCRIPT."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

PARTS = 4


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=0, help="of an epoch; 0: all")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    y = torch.randint(10, (2560,))
    x = torch.randn(10, 512)[y] + torch.randn(2560, 512)
    model = nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU())
    model.append(nn.Linear(1024, 10))
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05, fused=True)
    for epoch in range(args.epochs):
        total = torch.zeros(())
        order = torch.randperm(len(x))[rank::ranks]
        for step, batch in enumerate(order.split(64), 1):
            optimizer.zero_grad()
            for rows in batch.chunk(PARTS):
                score = ddp(x.index_select(0, rows))
                loss = nn.functional.cross_entropy(score, y.index_select(0, rows)) / PARTS
                loss.backward()  # <- here
                total += loss.detach()
            optimizer.step()
            if step == args.steps:
                break
        if rank == 0:
            print(f"epoch {epoch}: loss {total.item() / step:.3f}")
    if rank == 0:
        torch.save(model.state_dict(), "large.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
