"""Tell digits apart, and count how many are right."""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--steps", type=int, default=0, help="of an epoch; 0: all")
    args = parser.parse_args()
    torch.manual_seed(0)
    values, kinds = load_digits(return_X_y=True)
    x, y = torch.tensor(values, dtype=torch.float32) / 16, torch.tensor(kinds)
    model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    for epoch in range(args.epochs):
        right = torch.zeros(())
        for step, rows in enumerate(torch.randperm(len(x)).split(128), 1):
            batch, wanted = x.index_select(0, rows), y.index_select(0, rows)
            loss = nn.functional.cross_entropy(model(batch), wanted)  # <- here
            right += (model(batch).detach().argmax(1) == wanted).sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step == args.steps:
                break
        print(f"epoch {epoch}: last loss {loss.item():.3f}, {right:.0f} right")


if __name__ == "__main__":
    main()
