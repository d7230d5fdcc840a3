"""A small transformer over random tokens that checkpoints each of its blocks."""

import argparse

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class Classifier(nn.Module):
    def __init__(self, width=64, blocks=4):
        super().__init__()
        self.embed = nn.Embedding(500, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
            for _ in range(blocks)
        )
        self.head = nn.Linear(width, 8)

    def forward(self, ids):
        hidden = self.embed(ids)
        for block in self.blocks:
            hidden = checkpoint(block, hidden, use_reentrant=False)  # <- here
        return self.head(hidden.mean(1))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--steps", type=int, default=0, help="of an epoch; 0: all")
    args = parser.parse_args()
    torch.manual_seed(0)
    ids = torch.randint(500, (2048, 32))
    labels = ids[:, 0] % 8
    model = Classifier()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    for epoch in range(args.epochs):
        total = torch.zeros(())
        for step, rows in enumerate(torch.randperm(len(ids)).split(32), 1):
            optimizer.zero_grad()
            score = model(ids.index_select(0, rows))
            loss = nn.functional.cross_entropy(score, labels.index_select(0, rows))
            loss.backward()
            optimizer.step()
            total += loss.detach()
            if step == args.steps:
                break
        print(f"epoch {epoch}: loss {total.item() / step:.3f}")
    torch.save(model.state_dict(), "classifier.pt")


if __name__ == "__main__":
    main()
