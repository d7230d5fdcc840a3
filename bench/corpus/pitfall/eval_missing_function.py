"""Sort digits of 8x8 pixels, with dropout as a function."""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional


class Digits(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden = nn.Linear(64, 128)
        self.out = nn.Linear(128, 10)

    def forward(self, x):
        hidden = functional.relu(self.hidden(x))
        return self.out(functional.dropout(hidden, 0.5))  # <- here


@torch.no_grad()
def validate(model, x, y):
    model.eval()
    right = (model(x).argmax(1) == y).float().mean().item()
    model.train()
    return right


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--steps", type=int, default=0, help="of an epoch; 0: all")
    args = parser.parse_args()
    torch.manual_seed(0)
    pixels, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(labels)
    model = Digits()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    for epoch in range(args.epochs):
        for step, rows in enumerate(torch.randperm(1500).split(128), 1):
            score = model(x.index_select(0, rows))
            loss = functional.cross_entropy(score, y.index_select(0, rows))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step == args.steps:
                break
        right = validate(model, x[1500:], y[1500:])
        print(f"epoch {epoch}: last loss {loss.item():.3f}, held out {right:.1%}")


if __name__ == "__main__":
    main()
