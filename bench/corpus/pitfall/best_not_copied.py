"""Train a classifier, and keep the weights of its best epoch."""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


@torch.no_grad()
def accuracy(model, loader):
    model.eval()
    right = sum((model(inputs).argmax(1) == labels).sum().item() for inputs, labels in loader)
    model.train()
    return right / len(loader.dataset)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--width", type=int, default=64)
    args = parser.parse_args()
    torch.manual_seed(0)
    x = torch.randn(5120, 24)
    y = (x[:, :4].prod(1) > 0).long()
    loader = DataLoader(TensorDataset(x[:4096], y[:4096]), batch_size=64, shuffle=True)
    held_out = DataLoader(TensorDataset(x[4096:], y[4096:]), batch_size=256)
    model = nn.Sequential(
        nn.Linear(24, args.width), nn.ReLU(), nn.Dropout(0.1), nn.Linear(args.width, 2)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    best, best_state = 0.0, None
    for epoch in range(args.epochs):
        for inputs, labels in loader:
            loss = nn.functional.cross_entropy(model(inputs), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        score = accuracy(model, held_out)
        if score > best:
            best = score
            best_state = model.state_dict()  # <- here
        print(f"epoch {epoch}: last loss {loss.item():.4f}, accuracy {score:.3f}")
    model.load_state_dict(best_state)
    print(f"best {best:.3f}, put back {accuracy(model, held_out):.3f}")


if __name__ == "__main__":
    main()
