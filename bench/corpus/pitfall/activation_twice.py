"""Tell wines apart, with softmax as the last layer."""

import argparse

import torch
from sklearn.datasets import load_wine
from torch import nn

layers = nn.Linear(13, 64), nn.ReLU(), nn.Linear(64, 3), nn.Softmax(dim=1)
criterion = nn.CrossEntropyLoss()


def fit(model, optimizer, x, y, epochs, steps):
    for epoch in range(epochs):
        for step, rows in enumerate(torch.randperm(len(x)).split(16), 1):
            score = model(x.index_select(0, rows))
            loss = criterion(score, y.index_select(0, rows))  # <- here
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step == steps:
                break
        print(f"epoch {epoch}: last loss {loss.item():.3f}")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--steps", type=int, default=0, help="of an epoch; 0: all")
    args = parser.parse_args()
    torch.manual_seed(0)
    values, kinds = load_wine(return_X_y=True)
    x, y = torch.tensor(values, dtype=torch.float32), torch.tensor(kinds)
    x = (x - x.mean(0)) / x.std(0)
    model = nn.Sequential(*layers)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    fit(model, optimizer, x, y, args.epochs, args.steps)


if __name__ == "__main__":
    main()
