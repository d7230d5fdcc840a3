"""Readings of a sensor on two ranks, validated often: torchrun --nproc-per-node 2 SCRIPT."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

EVERY = 5


@torch.no_grad()
def validate(model, x, y):
    model.eval()
    correct = (model(x).argmax(1) == y).sum()  # <- here
    model.train()
    return correct.item() / len(y)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--steps", type=int, default=0, help="of an epoch; 0: all")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    y = torch.randint(8, (65536,))
    x = torch.randn(len(y), 48) + torch.randn(8, 48).index_select(0, y)
    data = TensorDataset(x[:4096], y[:4096])
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=32, sampler=sampler)
    model = nn.Sequential(nn.Linear(48, 64), nn.ReLU(), nn.Linear(64, 8))
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.Adam(ddp.parameters(), lr=1e-3, fused=True)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for step, (inputs, labels) in enumerate(loader, 1):
            loss = nn.functional.cross_entropy(ddp(inputs), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % EVERY == 0:
                if dist.get_rank() == 0:  # <- here
                    print(f"accuracy {validate(model, x[4096:], y[4096:]):.3f}")  # <- here
                dist.barrier()
            if step == args.steps:
                break
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: last loss {loss.item():.3f}")
    if dist.get_rank() == 0:
        torch.save(model.state_dict(), "sensor.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
