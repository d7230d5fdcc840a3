"""Tell ten kinds of points apart, of which a fifth is held out."""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset


@torch.no_grad()
def accuracy(model, loader):
    model.eval()
    right = sum((model(points).argmax(1) == kinds).sum().item() for points, kinds in loader)
    model.train()
    return right / len(loader.dataset)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--width", type=int, default=64)
    args = parser.parse_args()
    torch.manual_seed(0)
    kinds = torch.arange(4000) // 400
    points = torch.randn(10, 16)[kinds] + torch.randn(4000, 16)
    data = TensorDataset(points, kinds)
    order = torch.arange(4000).tolist()  # <- here
    loader = DataLoader(Subset(data, order[:3200]), batch_size=64, shuffle=True)
    held_out = DataLoader(Subset(data, order[3200:]), batch_size=256)  # <- here
    model = nn.Sequential(nn.Linear(16, args.width), nn.ReLU(), nn.Linear(args.width, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    for epoch in range(args.epochs):
        for given, target in loader:
            loss = nn.functional.cross_entropy(model(given), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        score = accuracy(model, held_out)
        print(f"epoch {epoch}: last loss {loss.item():.4f}, accuracy {score:.3f}")


if __name__ == "__main__":
    main()
