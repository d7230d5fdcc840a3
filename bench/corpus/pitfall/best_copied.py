"""Tell waves apart; the weights with the lowest loss are kept."""

import argparse
import copy

import torch
from torch import nn


def waves(count):
    kinds = torch.randint(4, (count,))
    curves = torch.sin(torch.arange(32) * (1 + kinds[:, None]) / 5)
    return curves + 0.5 * torch.randn(count, 32), kinds


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--steps", type=int, default=0, help="of an epoch; 0: all")
    args = parser.parse_args()
    torch.manual_seed(0)
    (x, y), (held_x, held_y) = waves(8192), waves(512)
    layers = [part for _ in range(4) for part in (nn.Linear(32, 32), nn.ReLU())]
    model = nn.Sequential(*layers, nn.Linear(32, 4))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    lowest, smooth, best = float("inf"), 2.0, None
    for epoch in range(args.epochs):
        model.train()
        for step, rows in enumerate(torch.randperm(len(x)).split(128), 1):
            loss = nn.functional.cross_entropy(
                model(x.index_select(0, rows)), y.index_select(0, rows)
            )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            smooth = 0.98 * smooth + 0.02 * loss.item()
            if smooth < lowest:
                lowest, best = smooth, copy.deepcopy(model.state_dict())  # <- here
            if step == args.steps:
                break
        model.eval()
        with torch.no_grad():
            right = (model(held_x).argmax(1) == held_y).float().mean().item()
        print(f"epoch {epoch}: lowest loss {lowest:.3f}, {right:.1%} right")
    model.load_state_dict(best)


if __name__ == "__main__":
    main()
