"""Prices from a few measures, tuned by a page about another OpenMP."""

import argparse

import torch
from torch import nn


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--steps", type=int, default=0, help="of an epoch; 0: all")
    args = parser.parse_args()
    torch.manual_seed(0)
    x = torch.randn(4096, 24)
    y = x[:, :4].prod(1) + 0.1 * torch.randn(len(x))
    model = nn.Sequential(nn.Linear(24, 48), nn.ReLU(), nn.Linear(48, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    for epoch in range(args.epochs):
        total = torch.zeros(())
        for step, rows in enumerate(torch.randperm(len(x)).split(32), 1):
            predicted = model(x.index_select(0, rows)).squeeze(1)
            loss = nn.functional.mse_loss(predicted, y.index_select(0, rows))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.detach()
            if step == args.steps:
                break
        print(f"epoch {epoch}: loss {total.item() / step:.3f}")
    torch.save(model.state_dict(), "prices.pt")


if __name__ == "__main__":
    main()
