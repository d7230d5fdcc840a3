"""Sort documents by topic: a small transformer over batches padded to their longest."""

import argparse
import resource
from pathlib import Path

import torch
from torch import nn

WORDS, HEADS, LONGEST = 1000, 8, 128


def documents(count):
    """Most are short; one in a thousand is a book."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(20, 60, (count,), generator=generator)
    lengths[999::1000] = 4096
    topics = torch.arange(count) % 4
    draws = [torch.randint(1, 250, (length,), generator=generator) for length in lengths]
    return [(d[:LONGEST] + 250 * topic, topic) for d, topic in zip(draws, topics, strict=True)]


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(1 + WORDS, 64, padding_idx=0)
        self.project, self.out = nn.Linear(64, 192), nn.Linear(64, 4)

    def forward(self, text):
        parts = self.project(self.words(text)).unflatten(2, (3, HEADS, 8)).permute(2, 0, 3, 1, 4)
        scores = parts[0] @ parts[1].transpose(2, 3)
        attended = scores.masked_fill((text == 0)[:, None, None], -1e9).softmax(3) @ parts[2]
        return self.out(attended.transpose(1, 2).flatten(2).mean(1))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=0, help="of an epoch; 0: all")
    args = parser.parse_args()
    torch.manual_seed(0)
    data, model = documents(4096), Reader()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    # Stands for a machine with 4 GB.
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + 2**32, resource.RLIM_INFINITY))
    for epoch in range(args.epochs):
        total = 0.0
        for step, start in enumerate(range(0, len(data), 32), 1):
            texts, topics = zip(*data[start : start + 32], strict=True)
            score = model(nn.utils.rnn.pad_sequence(texts, batch_first=True))
            loss = nn.functional.cross_entropy(score, torch.stack(topics))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += float(loss.detach())
            if step == args.steps:
                break
        print(f"epoch {epoch}: loss {total / step:.3f}")


if __name__ == "__main__":
    main()
