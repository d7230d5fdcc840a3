"""Words that stand beside each other get like vectors."""

import argparse

import torch
from torch import nn

WORDS, WIDTH = 20_000, 64


class Pairs(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.mix = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(12)])

    def forward(self, words):
        x = self.words(words)
        for layer in self.mix:
            x = x + torch.tanh(layer(x))
        return x


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=50, help="of an epoch")
    args = parser.parse_args()
    torch.manual_seed(0)
    words = torch.randint(WORDS, (40_000,))
    beside = (words + torch.randint(1, 4, words.shape)) % WORDS
    model = Pairs()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    for epoch in range(args.epochs):
        total = torch.zeros(())
        for rows in torch.randperm(len(words)).split(128)[: args.steps]:
            left = model(words.index_select(0, rows))
            right = model(beside.index_select(0, rows))
            loss = nn.functional.cross_entropy(left @ right.T / 8, torch.arange(len(rows)))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.detach()
        print(f"epoch {epoch}: loss {total.item() / args.steps:.3f}")
    torch.save(model.state_dict(), "pairs.pt")


if __name__ == "__main__":
    main()
