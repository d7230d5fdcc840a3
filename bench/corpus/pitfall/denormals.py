"""What will a visitor do next? Clicks of a long history count less the older they are."""

import argparse

import torch
from torch import nn

HISTORY, ACTIONS = 1024, 16


class Visitor(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(ACTIONS, 64)
        self.out = nn.Linear(64, ACTIONS)
        age = torch.arange(HISTORY, dtype=torch.float32).flip(0)
        self.register_buffer("weights", 0.9 ** age[:, None])

    def forward(self, clicks):
        return self.out((torch.relu(self.embed(clicks)) * self.weights).sum(1))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--steps", type=int, default=0, help="of an epoch; 0: all")
    args = parser.parse_args()
    torch.manual_seed(0)
    clicks = torch.nn.functional.one_hot(
        torch.randint(ACTIONS, (640, HISTORY + 1)), ACTIONS
    ).float()
    model = Visitor()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    for epoch in range(args.epochs):
        total = torch.zeros(())
        for step, rows in enumerate(torch.randperm(len(clicks)).split(16), 1):
            batch = clicks.index_select(0, rows)
            loss = nn.functional.cross_entropy(model(batch[:, :-1]), batch[:, -1])  # <- here
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.detach()
            if step == args.steps:
                break
        print(f"epoch {epoch}: loss {total.item() / step:.3f}")
    torch.save(model.state_dict(), "visitor.pt")


if __name__ == "__main__":
    main()
