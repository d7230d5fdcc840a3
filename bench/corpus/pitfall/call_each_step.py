"""Sort digits of 8x8 pixels, with the spread of every gradient kept for a later look."""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn


class Tracker:
    """Keeps quantiles of the gradients of each step in memory."""

    def __init__(self):
        self.at = torch.linspace(0, 1, 21)
        self.rows = []

    def follow(self, model, loss):
        spread = {
            name: torch.quantile(value.grad.flatten(), self.at).tolist()
            for name, value in model.named_parameters()
        }
        self.rows.append({"loss": loss.item(), "spread": spread})


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=400)
    parser.add_argument("--steps", type=int, default=0, help="of an epoch; 0: all")
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_flush_denormal(True)
    pixels, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(labels)
    train, held = torch.arange(1500), torch.arange(1500, len(x))
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU())
    model.append(nn.Linear(128, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    tracker = Tracker()
    number = 0
    for epoch in range(args.epochs):
        order = train[torch.randperm(len(train))]
        for step, rows in enumerate(order.split(64), 1):
            output = model(x.index_select(0, rows))
            loss = nn.functional.cross_entropy(output, y.index_select(0, rows))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            tracker.follow(model, loss.detach())  # <- here
            number += 1
            if step == args.steps:
                break
        with torch.no_grad():
            right = (model(x[held]).argmax(1) == y[held]).float().mean().item()
        print(f"epoch {epoch}: held out {right:.1%}, {len(tracker.rows)} rows kept")


if __name__ == "__main__":
    main()
