"""Learn to write what comes next in sequences that count on, each in steps of its own."""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader

WORDS, LENGTH = 48, 32


class Writer(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.words = nn.Embedding(WORDS, width)
        self.places = nn.Embedding(LENGTH, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2)
        self.out = nn.Linear(width, WORDS)

    def forward(self, words):
        places = torch.arange(words.shape[1], device=words.device)
        x = self.words(words) + self.places(places)
        return self.out(self.layers(x))


def sequence():
    start, step = torch.randint(0, WORDS, (2,)).tolist()
    return (start + step * torch.arange(LENGTH + 1)) % WORDS


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--steps", type=int, default=0, help="of an epoch; 0: all")
    args = parser.parse_args()
    torch.manual_seed(0)
    data = torch.stack([sequence() for _ in range(1280)])
    loader = DataLoader(data, batch_size=32, shuffle=True)
    model = Writer()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    for epoch in range(args.epochs):
        for step, words in enumerate(loader, 1):
            scores = model(words[:, :-1])  # <- here
            targets = words[:, 1:].reshape(-1)
            loss = nn.functional.cross_entropy(scores.reshape(-1, WORDS), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step == args.steps:
                break
        print(f"epoch {epoch}: last loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
