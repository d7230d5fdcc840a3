"""Sort sequences of readings, with settings that came along from a larger machine."""

import argparse

import torch
from torch import nn


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=0, help="of an epoch; 0: all")
    args = parser.parse_args()
    torch.manual_seed(0)
    y = torch.randint(6, (2560,))
    x = torch.sin(torch.arange(48)[:, None] * (1 + y[:, None, None]) / 6).repeat(1, 1, 16)
    x += 0.5 * torch.randn_like(x)
    model = nn.ModuleDict({"layers": nn.Sequential(), "out": nn.Linear(64, 6)})
    for width in (16, 64):
        model["layers"].extend([nn.Conv1d(width, 64, 5, padding=2), nn.BatchNorm1d(64), nn.GELU()])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    for epoch in range(args.epochs):
        total = torch.zeros(())
        for step, rows in enumerate(torch.randperm(len(x)).split(64), 1):
            features = model["layers"](x.index_select(0, rows).transpose(1, 2))
            loss = nn.functional.cross_entropy(
                model["out"](features.mean(2)), y.index_select(0, rows)
            )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.detach()
            if step == args.steps:
                break
        print(f"epoch {epoch}: loss {total.item() / step:.3f}")
    torch.save(model.state_dict(), "sequences.pt")


if __name__ == "__main__":
    main()
