"""Tell digits apart by the parts of each that matter most."""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Classifier(nn.Module):
    """Weights for eight rows of pixels, by themselves, and layers for what is left."""

    def __init__(self, width):
        super().__init__()
        self.matters = nn.Linear(8, 1)
        self.layers = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))

    def forward(self, x):
        weights = torch.softmax(self.matters(x).squeeze(2), dim=0)  # <- here
        return self.layers((weights[:, :, None] * x).flatten(1))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--width", type=int, default=128)
    args = parser.parse_args()
    torch.manual_seed(0)
    pixels, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(pixels).float().view(-1, 8, 8) / 16, torch.tensor(labels))
    loader = DataLoader(data, batch_size=64, shuffle=True)
    model = Classifier(args.width)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    for epoch in range(args.epochs):
        for pixels, labels in loader:
            loss = nn.functional.cross_entropy(model(pixels), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch}: last loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
