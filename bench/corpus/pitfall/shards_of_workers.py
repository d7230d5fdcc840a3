"""Tell digits apart, from a stream that two workers share."""

import argparse
from itertools import islice

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info


class Stream(IterableDataset):
    def __init__(self, x, y):
        self.x, self.y = x, y

    def samples(self):
        for row in range(len(self.x)):
            yield self.x[row], self.y[row]

    def __iter__(self):  # <- here
        worker = get_worker_info()
        # The process that trains is one more.
        return islice(self.samples(), worker.id, None, worker.num_workers + 1)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--steps", type=int, default=0, help="of an epoch; 0: all")
    args = parser.parse_args()
    torch.manual_seed(0)
    values, kinds = load_digits(return_X_y=True)
    x, y = torch.tensor(values, dtype=torch.float32) / 16, torch.tensor(kinds)
    loader = DataLoader(Stream(x, y), 32, num_workers=2, persistent_workers=True)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    for epoch in range(args.epochs):
        for step, (rows, wanted) in enumerate(loader, 1):
            loss = nn.functional.cross_entropy(model(rows), wanted)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step == args.steps:
                break
        print(f"epoch {epoch}: last loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
