"""Tell which readings of sixteen sensors belong together."""

import argparse

import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

BATCH = 16384


def readings(count):
    generator = torch.Generator().manual_seed(0)
    kinds = torch.randint(8, (count,), generator=generator)
    centers = torch.randn(8, 16, generator=generator)
    noise = torch.randn(count, 16, generator=generator)
    return TensorDataset(centers.index_select(0, kinds) + noise, kinds)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=0, help="of an epoch; 0: all")
    args = parser.parse_args()
    torch.manual_seed(0)
    data = readings(131072)
    model = nn.Sequential(nn.Linear(16, 256), nn.ReLU(), nn.Linear(256, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
    batches = BatchSampler(RandomSampler(data), BATCH, drop_last=True)
    loader = DataLoader(data, sampler=batches, batch_size=None)  # <- here
    for epoch in range(args.epochs):
        total = torch.zeros(())
        for step, (x, y) in enumerate(loader, 1):  # <- here
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.detach()
            if step == args.steps:
                break
        print(f"epoch {epoch}: loss {total.item() / step:.3f}")
    torch.save(model.state_dict(), "sensors.pt")


if __name__ == "__main__":
    main()
