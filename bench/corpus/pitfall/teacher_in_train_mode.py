"""Teach a small classifier what a large one knows, by the shares that the large one gives."""

import argparse

import torch
from torch import nn


def samples(count):
    points = torch.randn(count, 32)
    return points, (points[:, :8].sum(1) > 0).long() + 2 * (points[:, 8:16].sum(1) > 0).long()


@torch.no_grad()
def solved(points, labels):
    """A wide network of random features, whose last layer is solved for."""
    front = nn.Sequential(nn.Linear(32, 512), nn.BatchNorm1d(512), nn.ReLU())
    head = nn.Linear(512, 4, bias=False)
    shares = 4 * nn.functional.one_hot(labels, 4).float() - 1
    head.weight.copy_(torch.linalg.lstsq(front(points), shares).solution.T)
    return nn.Sequential(front, nn.Dropout(0.5), head)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--steps", type=int, default=0, help="of an epoch; 0: all")
    args = parser.parse_args()
    torch.manual_seed(0)
    points, labels = samples(8192)
    teacher = solved(points, labels)
    student = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 4))
    optimizer = torch.optim.Adam(student.parameters(), lr=1e-3, fused=True)
    for epoch in range(args.epochs):
        for step, rows in enumerate(torch.randperm(len(points)).split(256), 1):
            batch = points.index_select(0, rows)
            with torch.no_grad():
                shares = teacher(batch).softmax(1)  # <- here
            loss = nn.functional.cross_entropy(student(batch), shares)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step == args.steps:
                break
        print(f"epoch {epoch}: last loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
