"""Tell digits apart by a network of as many layers as you like."""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn


class Deep(nn.Module):
    def __init__(self, depth, width=64):
        super().__init__()
        self.layers = [nn.Linear(64 if at == 0 else width, width) for at in range(depth)]
        self.head = nn.Linear(width, 10)

    def forward(self, x):
        for layer in self.layers:
            x = torch.relu(layer(x))
        return self.head(x)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--steps", type=int, default=0, help="of an epoch; 0: all")
    args = parser.parse_args()
    torch.manual_seed(0)
    values, kinds = load_digits(return_X_y=True)
    x, y = torch.tensor(values, dtype=torch.float32) / 16, torch.tensor(kinds)
    model = Deep(3)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    for epoch in range(args.epochs):
        for step, rows in enumerate(torch.randperm(len(x)).split(32), 1):
            score = model(x.index_select(0, rows))  # <- here
            loss = nn.functional.cross_entropy(score, y.index_select(0, rows))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step == args.steps:
                break
        print(f"epoch {epoch}: last loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
