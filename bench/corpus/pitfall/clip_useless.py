"""Learn a sine by a recurrent network, with clipped gradients."""

import argparse

import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_


class Wave(nn.Module):
    def __init__(self):
        super().__init__()
        self.memory = nn.GRU(1, 32, batch_first=True)
        self.out = nn.Linear(32, 1)

    def forward(self, x):
        return self.out(self.memory(x)[0])


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--steps", type=int, default=0, help="of an epoch; 0: all")
    args = parser.parse_args()
    torch.manual_seed(0)
    time = torch.arange(0, 60, 0.05)
    waves = torch.sin(time)[:, None].unfold(0, 41, 1).transpose(1, 2)
    model = Wave()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, fused=True)
    for epoch in range(args.epochs):
        for step, rows in enumerate(torch.randperm(len(waves)).split(32), 1):
            batch = waves.index_select(0, rows)
            loss = nn.functional.mse_loss(model(batch[:, :-1]), batch[:, 1:])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            clip_grad_norm_(model.parameters(), 0.1)  # <- here
            if step == args.steps:
                break
        print(f"epoch {epoch}: last loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
