"""Tell two kinds of measurements apart with a deep network."""

import argparse

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.out = nn.Linear(32, 256), nn.Linear(256, 2)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.LayerNorm(256)) for _ in range(6)
        )

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=False)  # <- here
        return self.out(x)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--steps", type=int, default=0, help="of an epoch; 0: all")
    args = parser.parse_args()
    torch.manual_seed(0)
    x = torch.randn(5120, 32)
    y = (x[:, :4].sum(1) > 0).long()
    model = Deep()
    optimizer = torch.optim.Adam(model.parameters())
    for epoch in range(args.epochs):
        for step, rows in enumerate(torch.randperm(5120).split(128), 1):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x[rows]), y[rows])
            loss.backward()
            optimizer.step()
            if step == args.steps:
                break
        print(f"epoch {epoch}: last loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
