"""Sort sentences of very different lengths."""

import argparse

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

WORDS = 500


class Sentences(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(WORDS, 32, padding_idx=0)
        self.gru = nn.GRU(32, 32, batch_first=True)
        self.out = nn.Linear(32, 2)

    def forward(self, words):
        mask = (words > 0).unsqueeze(2)
        return self.out((self.gru(self.embed(words))[0] * mask).sum(1) / mask.sum(1))


def sentences(count):
    """Most are short, a few very long: lengths 4 to 300."""
    generator = torch.Generator().manual_seed(0)
    lengths = (4 * 75 ** torch.rand(count, generator=generator) ** 2).int().tolist()
    found = [torch.randint(1, WORDS, (n,), generator=generator) for n in lengths]
    return [(words, int(words[0] > WORDS // 2)) for words in found]


def collate(batch):
    return (
        pad_sequence([words for words, _ in batch], batch_first=True),
        torch.tensor([label for _, label in batch]),
    )


def by_length(data, size):
    """Batches of like length, in a random order."""
    order = sorted(range(len(data)), key=lambda i: len(data[i][0]))
    batches = [order[i : i + size] for i in range(0, len(order), size)]
    return [batches[i] for i in torch.randperm(len(batches)).tolist()]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=0, help="of an epoch; 0: all")
    args = parser.parse_args()
    torch.manual_seed(0)
    data = sentences(1024)
    model = Sentences()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    loader = DataLoader(data, batch_sampler=by_length(data, 32), collate_fn=collate)
    for epoch in range(args.epochs):
        for step, (words, labels) in enumerate(loader, 1):
            loss = nn.functional.cross_entropy(model(words), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step == args.steps:
                break
        print(f"epoch {epoch}: last loss {loss.item():.3f}")
    torch.save(model.state_dict(), "sentences.pt")


if __name__ == "__main__":
    main()
