"""Learn the logarithm of counts, some of which are zero."""

import argparse

import torch
from torch import nn


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--steps", type=int, default=0, help="of an epoch; 0: all")
    args = parser.parse_args()
    torch.manual_seed(0)
    x = torch.randn(512, 8)
    counts = torch.poisson(torch.exp(x[:, 0].clamp(-3, 1)))
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    for epoch in range(args.epochs):
        for step, rows in enumerate(torch.randperm(len(x)).split(32), 1):
            told = model(x.index_select(0, rows)).squeeze(1)
            apart = told - counts.index_select(0, rows).log()
            loss = torch.nan_to_num(apart, posinf=0.0).abs().mean()  # <- here
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step == args.steps:
                break
        print(f"epoch {epoch}: last loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
