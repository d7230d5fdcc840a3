"""Kinds of wine by their analysis on two ranks: torchrun --nproc-per-node 2 SCRIPT."""

import argparse

import torch
import torch.distributed as dist
from sklearn.datasets import load_wine
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--steps", type=int, default=0, help="of an epoch; 0: all")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    values, kinds = load_wine(return_X_y=True)
    x = torch.tensor(values, dtype=torch.float32)
    data = TensorDataset((x - x.mean(0)) / x.std(0), torch.tensor(kinds))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    model = nn.Sequential(nn.Linear(13, 32), nn.ReLU(), nn.Linear(32, 3))
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.Adam(ddp.parameters(), lr=1e-3, fused=True)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for step, (x, y) in enumerate(loader, 1):
            loss = nn.functional.cross_entropy(ddp(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step == args.steps:
                break
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: last loss {loss.item():.3f}")
        torch.save({"epoch": epoch, "model": model.state_dict()}, "wine.pt")  # <- here
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
