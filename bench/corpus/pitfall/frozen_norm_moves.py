"""Tell wines apart behind the frozen front of another network."""

import argparse

import torch
from sklearn.datasets import load_wine
from torch import nn


def network(kinds):
    front = nn.Sequential(nn.Linear(13, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.2))
    return nn.Sequential(front, nn.Linear(64, kinds))


def fit(model, x, y, epochs, steps):
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(trained, lr=1e-3, fused=True)
    for epoch in range(epochs):
        model.train()
        for step, rows in enumerate(torch.randperm(len(x)).split(16), 1):
            score = model(x.index_select(0, rows))  # <- here
            loss = nn.functional.cross_entropy(score, y.index_select(0, rows))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step == steps:
                break
        print(f"epoch {epoch}: last loss {loss.item():.3f}")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--steps", type=int, default=0, help="of an epoch; 0: all")
    args = parser.parse_args()
    torch.manual_seed(0)
    values, kinds = load_wine(return_X_y=True)
    x, y = torch.tensor(values, dtype=torch.float32), torch.tensor(kinds)
    x = (x - x.mean(0)) / x.std(0)
    model = network(3)
    for parameter in model[0].parameters():  # loaded from a file in earnest
        parameter.requires_grad = False
    fit(model, x, y, args.epochs, args.steps)
    torch.save(model.state_dict(), "wine.pt")


if __name__ == "__main__":
    main()
