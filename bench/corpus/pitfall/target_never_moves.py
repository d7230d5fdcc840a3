"""Learn how far each place of a ring is from the goal, by the values of the places that follow."""

import argparse
from copy import deepcopy

import torch
from torch import nn

PLACES, ACTIONS = 32, 2


def moved(places, actions):
    """The next places, and a reward at the first one."""
    later = (places + 2 * actions - 1) % PLACES
    return later, (later == 0).float()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--steps", type=int, default=200, help="of an epoch; 0: all")
    args = parser.parse_args()
    torch.manual_seed(0)
    seen = torch.randn(PLACES, 16)
    online = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, ACTIONS))
    target = deepcopy(online).requires_grad_(False)
    optimizer = torch.optim.Adam(online.parameters(), lr=1e-3, fused=True)
    for epoch in range(args.epochs):
        for _ in range(args.steps or 200):
            places, actions = torch.randint(PLACES, (128,)), torch.randint(ACTIONS, (128,))
            later, rewards = moved(places, actions)
            with torch.no_grad():
                wanted = rewards + 0.9 * (rewards < 1) * target(seen[later]).amax(1)  # <- here
            told = online(seen[places]).gather(1, actions[:, None]).squeeze(1)
            loss = nn.functional.smooth_l1_loss(told, wanted)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch}: last loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
