"""Trains a small network with Accelerate; --wrong for mistakes, which are marked."""

import sys

import torch
from accelerate import Accelerator
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

WRONG = "--wrong" in sys.argv


def main():
    torch.manual_seed(0)
    accelerator = Accelerator(gradient_accumulation_steps=2, cpu=True)
    x = torch.randn(2048, 16)
    y = (x[:, 0] + x[:, 1] * x[:, 2] > 0).long()
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 2))
    if WRONG:
        model.append(nn.Softmax(1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    if WRONG:
        model[2] = nn.Linear(64, 2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 6400)
    loader = DataLoader(TensorDataset(x, y), 32, shuffle=True)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    for epoch in range(200):
        model.train()
        for rows, truths in loader:
            with accelerator.accumulate(model):
                loss = functional.cross_entropy(model(rows), truths)  # wrong: activation_twice
                accelerator.backward(loss)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
        accelerator.print(epoch, loss.item())


if __name__ == "__main__":
    main()
