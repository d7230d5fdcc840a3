"""A click-through model on LibSVM text, trained on the first part of a day, judged on the rest.

    python examples/click_through.py [day.svm ...]

Without files it writes a day of made-up clicks: 39 fields as in Criteo's logs, 13 numbers and 26
categories, of which a few decide. Rows are found by an offset index, so they are shuffled globally
without being loaded, and the split by order holds out the end of the day, as in production.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
from torch import nn

import flatout

ROWS, FIELDS, IDS = 60_000, 39, 20_000


class Wide(nn.Module):
    """Logistic regression with factors: each id has a weight and a short vector."""

    def __init__(self, ids: int, factors: int = 8) -> None:
        super().__init__()
        self.weights = nn.EmbeddingBag(ids, 1, mode="sum")
        self.factors = nn.Embedding(ids, factors)
        nn.init.zeros_(self.weights.weight)
        nn.init.normal_(self.factors.weight, std=0.01)

    def forward(self, ids: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        linear = self.weights(ids, per_sample_weights=values).squeeze(1)
        vectors = self.factors(ids) * values.unsqueeze(-1)
        pairs = vectors.sum(dim=1).square() - vectors.square().sum(dim=1)
        return linear + 0.5 * pairs.sum(dim=1)


def write_day(path: Path) -> None:
    """Clicks that depend on two numbers and on three of the categories."""
    draw = np.random.default_rng(1)
    numbers = draw.random((ROWS, 13)).round(4)
    low = 14 + np.arange(26) * ((IDS - 14) // 26)
    categories = low + draw.integers(0, (IDS - 14) // 26, (ROWS, 26)) // 40 * 40
    liked = draw.normal(size=IDS)
    score = 2 * (numbers[:, 0] - numbers[:, 1]) + liked[categories[:, :3]].sum(axis=1) - 2.5
    clicks = draw.random(ROWS) < 1 / (1 + np.exp(-2 * score))
    with path.open("w") as file:
        for click, row, ids in zip(clicks, numbers, categories, strict=True):
            pairs = [f"{i + 1}:{value:g}" for i, value in enumerate(row)]
            file.write(f"{int(click)} {' '.join(pairs)} {' '.join(f'{i}:1' for i in ids)}\n")


def main() -> None:
    files: list[str | Path] = list(sys.argv[1:])
    if not files:
        files = [Path("day.svm")]
        write_day(Path("day.svm"))
    day = flatout.data.libsvm(files, layout="fixed")
    train, rest = day.split(0.9, by="order")
    torch.manual_seed(0)
    model = Wide(day.schema.options["features"] + 1)
    trainer = flatout.Trainer(
        model, loss="binary_cross_entropy", lr=0.005, metrics=["auc", "accuracy"]
    )
    batches = train.shuffle(seed=1).batch(1024)
    history = trainer.fit(batches, validation_data=rest.batch(4096), epochs=3)
    trainer.save("clicks.safetensors")
    print(history.summary())
    batches.explain()


if __name__ == "__main__":
    main()
