"""Find digits in larger pictures: convolutions and max-pooling."""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn


class Finder(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(1, 16, 3, padding=1)
        self.second = nn.Conv2d(16, 16, 3, padding=1)
        self.pool, self.act = nn.MaxPool2d(4), nn.ReLU()
        self.out = nn.Linear(144, 10)

    def forward(self, x):
        x = self.act(self.pool(self.first(x)))
        x = self.act(self.pool(self.second(x)))
        return self.out(x.flatten(1))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=0, help="of an epoch; 0: all")
    args = parser.parse_args()
    torch.manual_seed(0)
    pixels, labels = load_digits(return_X_y=True)
    x = torch.tensor(pixels, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    x = nn.functional.interpolate(x, size=48)
    y = torch.tensor(labels)
    model = Finder()
    model = model.to(memory_format=torch.channels_last)
    x = x.contiguous(memory_format=torch.channels_last)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    for epoch in range(args.epochs):
        total = torch.zeros(())
        for step, rows in enumerate(torch.randperm(1280).split(64), 1):
            score = model(x.index_select(0, rows))
            loss = nn.functional.cross_entropy(score, y.index_select(0, rows))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.detach()
            if step == args.steps:
                break
        with torch.no_grad():
            right = (model(x[1500:]).argmax(1) == y[1500:]).float().mean().item()
        print(f"epoch {epoch}: loss {total.item() / step:.3f}, held out {right:.1%}")
    torch.save(model.state_dict(), "finder.pt")


if __name__ == "__main__":
    main()
