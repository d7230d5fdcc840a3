"""Learn what a larger network says of wines, from its probabilities."""

import argparse

import torch
from sklearn.datasets import load_wine
from torch import nn
from torch.nn import functional


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--steps", type=int, default=0, help="of an epoch; 0: all")
    args = parser.parse_args()
    torch.manual_seed(0)
    values, _ = load_wine(return_X_y=True)
    x = torch.tensor(values, dtype=torch.float32)
    x = (x - x.mean(0)) / x.std(0)
    teacher = nn.Sequential(nn.Linear(13, 256), nn.ReLU(), nn.Linear(256, 3))
    wanted = (8 * teacher(x)).softmax(1).detach()
    model = nn.Sequential(nn.Linear(13, 32), nn.ReLU(), nn.Linear(32, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    for epoch in range(args.epochs):
        for step, rows in enumerate(torch.randperm(len(x)).split(16), 1):
            said = functional.softmax(model(x.index_select(0, rows)), dim=1)
            target = wanted.index_select(0, rows)
            loss = functional.kl_div(said, target, reduction="batchmean")  # <- here
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step == args.steps:
                break
        print(f"epoch {epoch}: last loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
