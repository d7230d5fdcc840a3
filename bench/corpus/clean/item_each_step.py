"""Sort digits of 8x8 pixels, with the running loss and accuracy at hand."""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=20)
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
    for epoch in range(args.epochs):
        total, count = 0.0, 0
        order = train[torch.randperm(len(train))]
        for step, rows in enumerate(order.split(64), 1):
            loss = nn.functional.cross_entropy(
                model(x.index_select(0, rows)), y.index_select(0, rows)
            )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.detach() * len(rows)
            count += len(rows)
            if step == args.steps:
                break
        with torch.no_grad():
            right = (model(x[held]).argmax(1) == y[held]).float().mean().item()
        print(f"epoch {epoch}: loss {total / count:.3f}, held out {right:.1%}")
    torch.save(model.state_dict(), "digits.pt")


if __name__ == "__main__":
    main()
