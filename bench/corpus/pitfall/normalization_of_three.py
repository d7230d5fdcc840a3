"""Tell kinds of seeds apart by four measures; there are a training, a validation and a test."""

import argparse

import numpy as np
import torch
from sklearn.preprocessing import StandardScaler
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Seeds(Dataset):
    def __init__(self, measures, kinds):
        self.measures = torch.tensor(measures, dtype=torch.float32)
        self.kinds = torch.tensor(kinds)

    def __len__(self):
        return len(self.kinds)

    def __getitem__(self, at):
        return self.measures[at], self.kinds[at]


def seeds(count):
    rng = np.random.default_rng(0)
    kinds = rng.integers(0, 3, count)
    centers = np.array([[14, 6, 3.3, 0.87], [18, 6.2, 3.7, 0.88], [12, 5.2, 2.9, 0.85]])
    return centers[kinds] + rng.normal(0, (1.2, 0.3, 0.2, 0.02), (count, 4)), kinds


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--steps", type=int, default=0, help="of an epoch; 0: all")
    args = parser.parse_args()
    torch.manual_seed(0)
    measures, kinds = seeds(600)
    scaler = StandardScaler()
    measures = scaler.fit_transform(measures)  # <- here
    parts = [Seeds(measures[at], kinds[at]) for at in np.split(np.arange(600), [400, 500])]
    train, held_out, test = (DataLoader(p, 40, shuffle=p is parts[0]) for p in parts)
    model = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, fused=True)

    def accuracy(loader):
        model.eval()
        with torch.no_grad():
            return torch.cat([model(x).argmax(1) == y for x, y in loader]).float().mean()

    for epoch in range(args.epochs):
        model.train()
        for step, (values, wanted) in enumerate(train, 1):
            loss = nn.functional.cross_entropy(model(values), wanted)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step == args.steps:
                break
        print(f"epoch {epoch}: {accuracy(held_out):.1%} right")
    print(f"of the test {accuracy(test):.1%} are right")


if __name__ == "__main__":
    main()
