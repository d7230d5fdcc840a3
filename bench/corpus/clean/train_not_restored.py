"""Sort wine by its chemistry, with BatchNorm and dropout."""

import argparse

import torch
from sklearn.datasets import load_wine
from torch import nn


@torch.no_grad()
def validate(model, x, y):
    model.eval()
    score = model(x)
    model.train()
    return (score.argmax(1) == y).float().mean().item()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--steps", type=int, default=0, help="of an epoch; 0: all")
    args = parser.parse_args()
    torch.manual_seed(0)
    values, kinds = load_wine(return_X_y=True)
    order = torch.randperm(len(kinds))
    x, y = torch.tensor(values, dtype=torch.float32)[order], torch.tensor(kinds)[order]
    x = (x - x.mean(0)) / x.std(0)
    model = nn.Sequential(nn.Linear(13, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.3))
    model.append(nn.Linear(64, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    for epoch in range(args.epochs):
        for step, rows in enumerate(torch.randperm(128).split(16), 1):
            score = model(x.index_select(0, rows))
            loss = nn.functional.cross_entropy(score, y.index_select(0, rows))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step == args.steps:
                break
        right = validate(model, x[128:], y[128:])
        print(f"epoch {epoch}: last loss {loss.item():.3f}, held out {right:.1%}")
    torch.save(model.state_dict(), "wine.pt")


if __name__ == "__main__":
    main()
