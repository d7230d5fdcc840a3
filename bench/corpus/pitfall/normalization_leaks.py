"""Tell digits apart, with a validation in each epoch."""

import argparse

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import StandardScaler
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def digits():
    values, kinds = load_digits(return_X_y=True)
    values = StandardScaler().fit_transform(values)  # <- here
    parts = train_test_split(values, kinds, test_size=0.2, random_state=0)
    x, other_x, y, other_y = parts
    return [
        TensorDataset(torch.tensor(a, dtype=torch.float32), torch.tensor(b))
        for a, b in ((x, y), (other_x, other_y))
    ]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=0, help="of an epoch; 0: all")
    args = parser.parse_args()
    torch.manual_seed(0)
    train, held_out = digits()
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.Adam(model.parameters())
    for epoch in range(args.epochs):
        model.train()
        for step, (x, y) in enumerate(DataLoader(train, 64, shuffle=True), 1):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            if step in (16, args.steps):
                break
        model.eval()
        with torch.no_grad():
            right = sum((model(x).argmax(1) == y).sum() for x, y in DataLoader(held_out, 128))
        print(f"epoch {epoch}: {right / len(held_out):.3f}")


if __name__ == "__main__":
    main()
