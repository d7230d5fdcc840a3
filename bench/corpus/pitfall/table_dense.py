"""Clicks on advertisements, from the ids of who saw what where."""

import argparse

import torch
from torch import nn

FIELDS, IDS, WIDTH = 6, 100_000, 16


class Clicks(nn.Module):
    def __init__(self):
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(IDS, WIDTH) for _ in range(FIELDS))
        self.deep = nn.Sequential(nn.Linear(FIELDS * WIDTH, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, ids):
        found = [table(ids[:, field]) for field, table in enumerate(self.tables)]
        return self.deep(torch.cat(found, 1)).squeeze(1)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=30, help="of an epoch")
    args = parser.parse_args()
    torch.manual_seed(0)
    ids = (torch.rand(100_000, FIELDS) ** 3 * IDS).long()
    clicked = ((ids % 5).sum(1) > 12).float()
    model = Clicks()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)  # <- here
    for epoch in range(args.epochs):
        total = torch.zeros(())
        for rows in torch.randperm(len(ids)).split(256)[: args.steps]:
            found = model(ids.index_select(0, rows))
            loss = nn.functional.binary_cross_entropy_with_logits(found, clicked[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()  # <- here
            total += loss.detach()
        print(f"epoch {epoch}: loss {total.item() / args.steps:.3f}")
    torch.save(model.state_dict(), "clicks.pt")


if __name__ == "__main__":
    main()
