"""Tell vibrations apart by crops of random length, with a compiled model."""

import argparse

import torch
from torch import nn


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--steps", type=int, default=0, help="of an epoch; 0: all")
    args = parser.parse_args()
    torch.manual_seed(0)
    y = torch.randint(6, (2048,))
    x = torch.sin(torch.arange(96) * (1 + y[:, None, None]) / 9) + torch.randn(len(y), 8, 96)
    layers = [nn.Conv1d(8, 32, 5), nn.ReLU(), nn.Conv1d(32, 32, 5), nn.ReLU()]
    net = nn.Sequential(*layers, nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(32, 6))
    model = torch.compile(net, backend="eager", dynamic=True)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3, fused=True)
    for epoch in range(args.epochs):
        total = torch.zeros(())
        for step, rows in enumerate(torch.randperm(len(x)).split(32), 1):
            length = int(torch.randint(32, 97, ()))
            batch = x.index_select(0, rows)[:, :, :length]
            loss = nn.functional.cross_entropy(model(batch), y.index_select(0, rows))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.detach()
            if step == args.steps:
                break
        print(f"epoch {epoch}: loss {total.item() / step:.3f}")
    torch.save(net.state_dict(), "vibrations.pt")


if __name__ == "__main__":
    main()
