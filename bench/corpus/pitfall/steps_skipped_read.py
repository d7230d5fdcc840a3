"""Learn what a sale is worth, from batches in which some visits end in one."""

import argparse
import math

import torch
from torch import nn


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--steps", type=int, default=0, help="of an epoch; 0: all")
    args = parser.parse_args()
    torch.manual_seed(0)
    x = torch.randn(2048, 8)
    sold = torch.rand(2048) < 0.2
    worth = x[:, 0].exp() + 0.1 * torch.randn(2048)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    for epoch in range(args.epochs):
        total = torch.zeros(())
        for step, rows in enumerate(torch.randperm(len(x)).split(8), 1):
            told = model(x.index_select(0, rows)).squeeze(1)
            apart = (told - worth.index_select(0, rows)).abs()
            loss = apart[sold.index_select(0, rows)].mean()
            if not math.isfinite(loss.item()):  # <- here
                continue
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.detach()
            if step == args.steps:
                break
        print(f"epoch {epoch}: loss {total.item() / step:.3f}")


if __name__ == "__main__":
    main()
