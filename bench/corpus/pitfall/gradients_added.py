"""Make noisy waves smooth, so that a critic cannot tell them from smooth ones."""

import argparse

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits as cross_entropy


def waves(count):
    begin, pace = torch.rand(count, 1) * 6, 0.1 + torch.rand(count, 1) * 0.4
    return torch.sin(begin + pace * torch.arange(32))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--steps", type=int, default=0, help="of an epoch; 0: all")
    args = parser.parse_args()
    torch.manual_seed(0)
    smooth, others = waves(2048), waves(2048)
    noisy = others + 0.3 * torch.randn(others.shape)
    cleaner = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))
    critic = nn.Sequential(nn.Linear(32, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))
    opt_cleaner = torch.optim.Adam(cleaner.parameters(), lr=1e-3)
    opt_critic = torch.optim.Adam(critic.parameters(), lr=1e-3)
    for epoch in range(args.epochs):
        for step, rows in enumerate(torch.randperm(2048).split(64), 1):
            opt_cleaner.zero_grad()
            opt_critic.zero_grad()
            made = cleaner(noisy[rows])
            told_smooth, told_made = critic(smooth[rows]), critic(made)
            told = torch.cat([told_smooth, told_made]).squeeze(1)
            loss_critic = cross_entropy(told, (torch.arange(len(told)) < len(rows)).float())
            loss_critic.backward(retain_graph=True)  # <- here
            opt_critic.step()
            score = critic(made).squeeze(1)
            loss = cross_entropy(score, torch.ones(len(rows)))
            loss.backward()
            opt_cleaner.step()
            if step == args.steps:
                break
        apart = nn.functional.mse_loss(made, others[rows]).item()
        print(f"epoch {epoch}: critic {loss_critic.item():.3f}, off by {apart:.3f}")


if __name__ == "__main__":
    main()
