"""Tell from a series whether it rises in its second half."""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Series(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.LSTM(16, 64)
        self.out = nn.Linear(64, 2)

    def forward(self, x):
        outputs, _ = self.layer(x)  # <- here
        return self.out(outputs[:, -1])


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--steps", type=int, default=0, help="of an epoch; 0: all")
    args = parser.parse_args()
    torch.manual_seed(0)
    x = torch.randn(1280, 40, 16)
    y = (x[:, 20:].mean((1, 2)) > x[:, :20].mean((1, 2))).long()
    loader = DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True)
    model = Series()
    optimizer = torch.optim.Adam(model.parameters())
    for epoch in range(args.epochs):
        for step, (rows, labels) in enumerate(loader, 1):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(rows), labels)
            loss.backward()
            optimizer.step()
            if step == args.steps:
                break
        print(f"epoch {epoch}: last loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
