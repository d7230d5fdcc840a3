"""Tell wines apart, with steps of four batches each."""

import argparse

import torch
from sklearn.datasets import load_wine
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

ACCUMULATED = 4


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--steps", type=int, default=0, help="of an epoch; 0: all")
    args = parser.parse_args()
    torch.manual_seed(0)
    values, kinds = load_wine(return_X_y=True)
    x, y = torch.tensor(values, dtype=torch.float32), torch.tensor(kinds)
    x = (x - x.mean(0)) / x.std(0)
    loader = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True, drop_last=True)
    model = nn.Sequential(nn.Linear(13, 64), nn.ReLU(), nn.Linear(64, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    for epoch in range(args.epochs):
        for count, (rows, labels) in enumerate(loader, 1):
            optimizer.zero_grad()  # <- here
            loss = nn.functional.cross_entropy(model(rows), labels)
            (loss / ACCUMULATED).backward()
            if count % ACCUMULATED == 0:
                optimizer.step()
            if count == ACCUMULATED * args.steps:
                break
        print(f"epoch {epoch}: last loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
