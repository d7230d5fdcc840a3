"""Tell sums of numbers apart, by a trainer that accumulates gradients."""

import argparse
import math

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset


def warm_up_then_cosine(optimizer, warm_up, steps):
    def share(step):
        if step < warm_up:
            return (step + 1) / warm_up
        return 0.5 * (1 + math.cos(math.pi * min(1.0, (step - warm_up) / (steps - warm_up))))

    return LambdaLR(optimizer, share)


class Trainer:
    def __init__(self, model, loader, epochs, accumulate):
        self.model, self.loader = model, loader
        self.epochs, self.accumulate = epochs, accumulate
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        steps = epochs * len(loader) // accumulate
        self.scheduler = warm_up_then_cosine(self.optimizer, 4, steps)

    def fit(self, most):
        for epoch in range(self.epochs):
            for number, (x, y) in enumerate(self.loader, 1):
                loss = nn.functional.cross_entropy(self.model(x), y) / self.accumulate
                loss.backward()
                if number % self.accumulate == 0:
                    nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
                    self.optimizer.step()
                    self.optimizer.zero_grad()
                self.scheduler.step()  # <- here
                if number == self.accumulate * most:
                    break
            print(f"epoch {epoch}: last loss {self.accumulate * loss.item():.3f}")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--steps", type=int, default=0, help="of an epoch; 0: all")
    args = parser.parse_args()
    torch.manual_seed(0)
    x = torch.randn(1600, 12)
    data = TensorDataset(x, (x[:, :4].sum(1) > 0).long())
    model = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 2))
    Trainer(model, DataLoader(data, 16, shuffle=True), args.epochs, accumulate=4).fit(args.steps)


if __name__ == "__main__":
    main()
