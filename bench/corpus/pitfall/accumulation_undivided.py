"""Tell digits apart, four batches to a step."""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

BATCHES = 4


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--steps", type=int, default=0, help="of an epoch; 0: all")
    args = parser.parse_args()
    torch.manual_seed(0)
    values, kinds = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(values, dtype=torch.float32) / 16, torch.tensor(kinds))
    loader = DataLoader(data, batch_size=8, shuffle=True, drop_last=True)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    for epoch in range(args.epochs):
        for batch, (x, y) in enumerate(loader, 1):
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()  # <- here
            if batch % BATCHES == 0:
                nn.utils.clip_grad_norm_(model.parameters(), 5.0)
                optimizer.step()
                optimizer.zero_grad()
            if batch == args.steps * BATCHES:
                break
        print(f"epoch {epoch}: last loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
