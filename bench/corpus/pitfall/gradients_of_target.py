"""Find the way out of a corridor: values of actions, learned from values that a copy gives."""

import argparse
import copy

import torch
from torch import nn


def transitions(count, length):
    state = torch.rand(count, 1) * length
    action = torch.randint(0, 2, (count,))
    after = (state + (2.0 * action[:, None] - 1) * torch.rand(count, 1)).clamp(0, length)
    return state, action, (after[:, 0] >= length - 1).float(), after


def network():
    layers = [nn.Linear(1, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 2)]
    return nn.Sequential(*layers)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--steps", type=int, default=0, help="of an epoch; 0: all")
    args = parser.parse_args()
    torch.manual_seed(0)
    states, actions, rewards, later = transitions(8192, 8)
    online = network()
    target = copy.deepcopy(online)
    optimizer = torch.optim.Adam(online.parameters(), lr=1e-3, fused=True)
    for epoch in range(args.epochs):
        target.load_state_dict(online.state_dict())
        for step, rows in enumerate(torch.randperm(len(states)).split(256), 1):
            ahead = target(later.index_select(0, rows)).max(1).values  # <- here
            ends = rewards.index_select(0, rows)
            values = online(states.index_select(0, rows))
            value = values.gather(1, actions.index_select(0, rows)[:, None]).squeeze(1)
            loss = nn.functional.smooth_l1_loss(value, ends + 0.95 * (1 - ends) * ahead)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step == args.steps:
                break
        print(f"epoch {epoch}: last loss {loss.item():.5f}")


if __name__ == "__main__":
    main()
