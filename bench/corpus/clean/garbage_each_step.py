"""What do readers read next? Visits as records, fed to bags of words."""

import argparse
import random

import torch
from torch import nn

WORDS = 2000


def visits(count):
    """Records as they come out of a document store."""
    rng = random.Random(0)
    return [
        {"id": i, "words": [rng.randrange(WORDS) for _ in range(8)], "tags": {"lang": "en"}}
        for i in range(count)
    ]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20, help="of an epoch")
    args = parser.parse_args()
    torch.manual_seed(0)
    records = visits(16_000)
    model = nn.Sequential(nn.EmbeddingBag(WORDS, 16), nn.ReLU(), nn.Linear(16, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, fused=True)
    for epoch in range(args.epochs):
        random.Random(epoch).shuffle(records)
        total = torch.zeros(())
        for step in range(args.steps):
            batch = records[step * 128 : (step + 1) * 128]
            words = torch.tensor([record["words"] for record in batch])
            loss = nn.functional.cross_entropy(model(words), words[:, 0] % 2)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.detach()
        print(f"epoch {epoch}: loss {total.item() / args.steps:.3f}")
    torch.save(model.state_dict(), "readers.pt")


if __name__ == "__main__":
    main()
