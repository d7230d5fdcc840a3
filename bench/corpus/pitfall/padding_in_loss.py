"""Learn to write the next number of sequences of unequal lengths, each with an end."""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader

PAD, END, WORDS = 0, 1, 40


class Writer(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, 32, padding_idx=PAD)
        self.layer = nn.GRU(32, 64, batch_first=True)
        self.out = nn.Linear(64, WORDS)

    def forward(self, words):
        return self.out(self.layer(self.words(words))[0])


def sequence():
    length = int(torch.randint(4, 24, ()))
    start = int(torch.randint(2, WORDS, ()))
    words = (start + 3 * torch.arange(length)) % (WORDS - 2) + 2
    return torch.cat([words, torch.tensor([END])])


def together(samples):
    return nn.utils.rnn.pad_sequence(samples, batch_first=True, padding_value=PAD)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--steps", type=int, default=0, help="of an epoch; 0: all")
    args = parser.parse_args()
    torch.manual_seed(0)
    data = [sequence() for _ in range(1280)]
    loader = DataLoader(data, batch_size=32, shuffle=True, collate_fn=together)
    model = Writer()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    criterion = nn.CrossEntropyLoss()
    for epoch in range(args.epochs):
        for step, words in enumerate(loader, 1):
            scores = model(words[:, :-1])
            loss = criterion(scores.reshape(-1, WORDS), words[:, 1:].reshape(-1))  # <- here
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step == args.steps:
                break
        print(f"epoch {epoch}: last loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
