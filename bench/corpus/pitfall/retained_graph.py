"""Predict the next reading of many sensors from the last 64."""

import argparse

import torch
from torch import nn


def readings(count, seed):
    generator = torch.Generator().manual_seed(seed)
    phase = 6.28 * torch.rand(count, 1, generator=generator)
    waves = torch.sin(torch.arange(65) / 5 + phase)
    waves += 0.1 * torch.randn(count, 65, generator=generator)
    return waves[:, :64], waves[:, 64:]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=0, help="of an epoch; 0: all")
    args = parser.parse_args()
    torch.manual_seed(0)
    x, y = readings(16384, 0)
    held_x, held_y = readings(1024, 1)
    model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh())
    model.append(nn.Linear(256, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, fused=True)
    history = []
    for epoch in range(args.epochs):
        order = torch.randperm(len(x))
        for step, rows in enumerate(order.split(256), 1):
            error = model(x.index_select(0, rows)) - y.index_select(0, rows)
            loss = error.square().mean()
            optimizer.zero_grad()
            loss.backward(retain_graph=True)
            optimizer.step()
            history.append(loss)  # <- here
            if step == args.steps:
                break
        with torch.no_grad():
            held_out = nn.functional.mse_loss(model(held_x), held_y).item()
        recent = torch.stack(history[-step:]).mean().item()
        print(f"epoch {epoch}: loss {recent:.4f}, held out {held_out:.4f}")
    torch.save(model.state_dict(), "sensors.pt")


if __name__ == "__main__":
    main()
