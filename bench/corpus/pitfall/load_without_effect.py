"""Train a head on an encoder that was trained before, from a file of the whole model."""

import argparse
import tempfile
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Autoencoder(nn.Module):
    """What the encoder was trained in."""

    def __init__(self, width):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(24, width), nn.ReLU(), nn.Linear(width, width))
        self.decoder = nn.Linear(width, 24)


class Classifier(nn.Module):
    """An encoder, and a head for two classes."""

    def __init__(self, width):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(24, width), nn.ReLU(), nn.Linear(width, width))
        self.head = nn.Linear(width, 2)

    def forward(self, x):
        return self.head(torch.relu(self.body(x)))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--width", type=int, default=64)
    args = parser.parse_args()
    torch.manual_seed(0)
    x = torch.randn(4096, 24)
    y = (x[:, :4].prod(1) > 0).long()
    loader = DataLoader(TensorDataset(x, y), batch_size=64, shuffle=True)
    model = Classifier(args.width)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "pretrained.pt")
        torch.save(Autoencoder(args.width).state_dict(), file)
        state = torch.load(file)
        model.load_state_dict(state, strict=False)  # <- here
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    for epoch in range(args.epochs):
        for inputs, labels in loader:
            loss = nn.functional.cross_entropy(model(inputs), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch}: last loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
