"""Tell digits apart, judged by cross-validation."""

import argparse

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import StratifiedKFold
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset


def train(model, optimizer, loader):
    model.train()
    for pixels, labels in loader:
        loss = nn.functional.cross_entropy(model(pixels), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


@torch.no_grad()
def accuracy(model, loader):
    model.eval()
    right = sum((model(pixels).argmax(1) == labels).sum().item() for pixels, labels in loader)
    return right / len(loader.dataset)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--width", type=int, default=128)
    args = parser.parse_args()
    torch.manual_seed(0)
    pixels, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(labels))
    model = nn.Sequential(nn.Linear(64, args.width), nn.ReLU(), nn.Linear(args.width, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    splits = StratifiedKFold(5, shuffle=True, random_state=0)
    scores = []
    for fold, (rows, held_out) in enumerate(splits.split(pixels, labels)):  # <- here
        loader = DataLoader(Subset(data, rows.tolist()), batch_size=64, shuffle=True)
        for epoch in range(args.epochs):
            loss = train(model, optimizer, loader)
            print(f"epoch {epoch} of fold {fold}: last loss {loss:.4f}")
        scores.append(accuracy(model, DataLoader(Subset(data, held_out.tolist()), batch_size=256)))
    print(f"accuracy {sum(scores) / len(scores):.3f}")


if __name__ == "__main__":
    main()
