"""Tell digits apart by a deep and narrow network, which once gave NaN."""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn


def prepare(seed):
    torch.manual_seed(seed)
    torch.autograd.set_detect_anomaly(True)  # <- here


def network(depth=12, width=32):
    layers = [nn.Linear(64, width)]
    for _ in range(depth):
        layers += [nn.LayerNorm(width), nn.GELU(), nn.Linear(width, width)]
    return nn.Sequential(*layers, nn.Linear(width, 10))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--steps", type=int, default=0, help="of an epoch; 0: all")
    args = parser.parse_args()
    prepare(0)
    values, kinds = load_digits(return_X_y=True)
    x, y = torch.tensor(values, dtype=torch.float32) / 16, torch.tensor(kinds)
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    for epoch in range(args.epochs):
        for step, rows in enumerate(torch.randperm(len(x)).split(32), 1):
            score = model(x.index_select(0, rows))
            loss = nn.functional.cross_entropy(score, y.index_select(0, rows))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step == args.steps:
                break
        print(f"epoch {epoch}: last loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
