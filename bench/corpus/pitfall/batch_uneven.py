"""Read handwritten digits on two ranks: torchrun --nproc-per-node 2 SCRIPT."""

import argparse

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel

BATCH = 7


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=0, help="of an epoch; 0: all")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    pixels, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(labels)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05, fused=True)
    for epoch in range(args.epochs):
        total = torch.zeros(())
        order = torch.randperm(len(x))
        for step, batch in enumerate(order[: len(x) // BATCH * BATCH].split(BATCH), 1):
            rows = batch.tensor_split(ranks)[rank]
            score = ddp(x.index_select(0, rows))  # <- here
            loss = nn.functional.cross_entropy(score, y.index_select(0, rows))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.detach()
            if step == args.steps:
                break
        if rank == 0:
            print(f"epoch {epoch}: loss {total.item() / step:.3f}")
    if rank == 0:
        torch.save(model.state_dict(), "digits.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
