"""Tell wines apart, with a rate that falls once no more are told."""

import argparse

import torch
from sklearn.datasets import load_wine
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--steps", type=int, default=0, help="of an epoch; 0: all")
    args = parser.parse_args()
    torch.manual_seed(0)
    values, kinds = load_wine(return_X_y=True)
    x, y = torch.tensor(values, dtype=torch.float32), torch.tensor(kinds)
    data = TensorDataset((x - x.mean(0)) / x.std(0), y)
    loader = DataLoader(data, batch_size=32, shuffle=True)
    model = nn.Sequential(nn.Linear(13, 64), nn.ReLU(), nn.Linear(64, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=3)
    for epoch in range(args.epochs):
        for step, (rows, wanted) in enumerate(loader, 1):
            loss = nn.functional.cross_entropy(model(rows), wanted)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step == args.steps:
                break
        with torch.no_grad():
            accuracy = (model(data.tensors[0]).argmax(1) == y).double().mean().item()
        scheduler.step(accuracy)  # <- here
        print(f"epoch {epoch}: accuracy {accuracy:.3f}, {scheduler.get_last_lr()}")


if __name__ == "__main__":
    main()
