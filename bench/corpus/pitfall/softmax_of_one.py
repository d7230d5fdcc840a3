"""Malignant or benign? A network over 30 measurements of cells."""

import argparse

import torch
from sklearn.datasets import load_breast_cancer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--steps", type=int, default=0, help="of an epoch; 0: all")
    args = parser.parse_args()
    torch.manual_seed(0)
    values, benign = load_breast_cancer(return_X_y=True)
    order = torch.randperm(len(values))
    x = torch.tensor(values, dtype=torch.float32)[order]
    y = torch.tensor(benign, dtype=torch.float32)[order]
    train = x[:450]
    x = (x - train.mean(0)) / train.std(0)
    loader = DataLoader(TensorDataset(x[:450], y[:450]), batch_size=32, shuffle=True)
    model = nn.Sequential(
        nn.Linear(30, 32),
        nn.ReLU(),
        nn.Linear(32, 1),
        nn.Softmax(dim=1),
    )
    criterion = nn.BCELoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    for epoch in range(args.epochs):
        model.train()
        for step, (rows, wanted) in enumerate(loader, 1):
            chance = model(rows).squeeze(1)  # <- here
            loss = criterion(chance, wanted)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step == args.steps:
                break
        model.eval()
        with torch.no_grad():
            right = ((model(x[450:]).squeeze(1) > 0.5) == y[450:].bool()).double().mean().item()
        print(f"epoch {epoch}: held out {right:.1%}")


if __name__ == "__main__":
    main()
