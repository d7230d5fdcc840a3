"""Tell textures apart with a small convolutional network."""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def textures(count, seed):
    generator = torch.Generator().manual_seed(seed)
    kinds = torch.arange(count) % 4
    noise = torch.randn(count, 1, 16, 16, generator=generator)
    stripes = torch.sin(torch.arange(16) * (1.0 + kinds[:, None, None, None]))
    return TensorDataset(stripes + noise, kinds)


def evaluate(model, loader):
    model.eval()
    with torch.no_grad():
        right = sum((model(x).argmax(1) == y).sum() for x, y in loader)
    model.train()
    return right.item() / len(loader.dataset)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=0, help="of an epoch; 0: all")
    args = parser.parse_args()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
    model.extend([nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 4)])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, fused=True)
    train = DataLoader(textures(1025, 0), batch_size=64, shuffle=True)  # <- here
    test = DataLoader(textures(256, 1), batch_size=256)
    for epoch in range(args.epochs):
        for step, (x, y) in enumerate(train, 1):  # <- here
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step == args.steps:
                break
        print(f"epoch {epoch}: last loss {loss.item():.3f}, test {evaluate(model, test):.1%}")
    torch.save(model.state_dict(), "textures.pt")


if __name__ == "__main__":
    main()
