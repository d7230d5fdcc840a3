"""Tell digits apart in mixed precision, with clipped gradients."""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn

device = "cuda" if torch.cuda.is_available() else "cpu"


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--steps", type=int, default=0, help="of an epoch; 0: all")
    args = parser.parse_args()
    torch.manual_seed(0)
    values, kinds = load_digits(return_X_y=True)
    x, y = torch.tensor(values, dtype=torch.float32).to(device) / 16, torch.tensor(kinds).to(device)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler(device)
    for epoch in range(args.epochs):
        for step, rows in enumerate(torch.randperm(len(x)).split(32), 1):
            with torch.autocast(device):
                score = model(x[rows])
                loss = nn.functional.cross_entropy(score, y[rows])
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)  # <- here
            scaler.step(optimizer)
            scaler.update()
            if step == args.steps:
                break
        print(f"epoch {epoch}: last loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
