"""DeepFM, Wide & Deep or DLRM on click logs, day by day: each day goes on from the one before.

    python examples/click_through.py [--model deepfm] [--epochs 2] [--out .] [day-1.svm ...]

A day is a file in the order of time, LibSVM text or, ending in .tsv, Criteo's format. LibSVM rows
have the same fields each, of which the first --numbers have numbers for values. Without files, two
days of made-up clicks are written: 39 fields as in Criteo's logs, 13 numbers and 26 categories, and
each day brings ids that the day before has not seen. The end of a day is held out.

Each day leaves its run in runs/MODEL/DAY and a plain model in MODEL.safetensors, with its ids in
MODEL.ids.safetensors, below --out: of a job on several nodes a folder that all of them see. Start
the command again after a crash: it goes on where it was.
"""

from __future__ import annotations

import argparse
from itertools import chain, pairwise
from pathlib import Path
from tempfile import NamedTemporaryFile

import numpy as np
import torch
from torch import Tensor, nn

import flatout
from flatout.data import Ids

NUMBERS, CATEGORIES, FACTORS = 13, 26, 8
ROWS, IDS, NEW = 60_000, 400, 20


def layers(*sizes: int) -> nn.Sequential:
    """Fully connected layers, with a ReLU behind each but the last."""
    pairs = ((nn.Linear(*pair), nn.ReLU()) for pair in pairwise(sizes))
    return nn.Sequential(*chain(*pairs))[:-1]


class Libsvm(nn.Module):
    """A weight and a vector for each id of a LibSVM row, times its value."""

    def __init__(self, fields: int, numbers: int) -> None:
        super().__init__()
        self.fields, self.numbers = fields, numbers
        # Tables get as many rows as there are ids when training begins.
        self.weights, self.vectors = nn.Embedding(1000, 1), nn.Embedding(1000, FACTORS)
        nn.init.zeros_(self.weights.weight)
        nn.init.normal_(self.vectors.weight, std=0.01)

    def forward(self, ids: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Sum of the weights (rows,), vectors (rows, fields, FACTORS), numbers (rows, numbers)."""
        linear = (self.weights(ids)[..., 0] * values).sum(1)
        return linear, self.vectors(ids) * values[..., None], values[:, : self.numbers]


class Criteo(nn.Module):
    """The same of Criteo's rows: numbers have a vector for each field, categories one for each."""

    fields, numbers = NUMBERS + CATEGORIES, NUMBERS

    def __init__(self) -> None:
        super().__init__()
        self.of_numbers = nn.Parameter(torch.randn(NUMBERS, FACTORS) * 0.01)
        self.linear = nn.Linear(NUMBERS, 1)
        self.weights, self.vectors = nn.Embedding(1000, 1), nn.Embedding(1000, FACTORS)
        nn.init.zeros_(self.weights.weight)
        nn.init.normal_(self.vectors.weight, std=0.01)

    def forward(self, integers: Tensor, categories: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """As of LibSVM."""
        numbers = integers.clamp(min=0).log1p()
        linear = self.linear(numbers)[:, 0] + self.weights(categories).sum((1, 2))
        vectors = [self.of_numbers * numbers[..., None], self.vectors(categories)]
        return linear, torch.cat(vectors, dim=1), numbers


class DeepFM(nn.Module):
    """A factorization machine and a deep network over the same vectors (Guo et al. 2017)."""

    def __init__(self, rows: Libsvm | Criteo) -> None:
        super().__init__()
        self.rows, self.deep = rows, layers(rows.fields * FACTORS, 128, 64, 1)

    def forward(self, **inputs: Tensor) -> Tensor:
        """Logits (rows,)."""
        linear, vectors, _ = self.rows(**inputs)
        pairs = vectors.sum(1).square() - vectors.square().sum(1)
        return linear + 0.5 * pairs.sum(1) + self.deep(vectors.flatten(1))[:, 0]


class WideDeep(nn.Module):
    """A weight for each id, and a deep network over vectors and numbers (Cheng et al. 2016)."""

    def __init__(self, rows: Libsvm | Criteo) -> None:
        super().__init__()
        self.rows = rows
        categories = rows.fields - rows.numbers
        self.deep = layers(categories * FACTORS + rows.numbers, 128, 64, 1)

    def forward(self, **inputs: Tensor) -> Tensor:
        """Logits (rows,)."""
        wide, vectors, numbers = self.rows(**inputs)
        deep = torch.cat([vectors[:, self.rows.numbers :].flatten(1), numbers], dim=1)
        return wide + self.deep(deep)[:, 0]


class DLRM(nn.Module):
    """Numbers become a vector; its products with those of categories count (Naumov et al. 2019)."""

    def __init__(self, rows: Libsvm | Criteo) -> None:
        super().__init__()
        self.rows, self.bottom = rows, layers(rows.numbers, 64, FACTORS)
        count = rows.fields - rows.numbers + 1
        self.top = layers(FACTORS + count * (count - 1) // 2, 128, 64, 1)
        self.register_buffer("pairs", torch.triu_indices(count, count, 1), persistent=False)

    def forward(self, **inputs: Tensor) -> Tensor:
        """Logits (rows,)."""
        _, vectors, numbers = self.rows(**inputs)
        bottom = self.bottom(numbers)
        all_vectors = torch.cat([bottom[:, None], vectors[:, self.rows.numbers :]], dim=1)
        products = all_vectors @ all_vectors.transpose(1, 2)
        dots = products[:, self.pairs[0], self.pairs[1]]
        return self.top(torch.cat([bottom, dots], dim=1))[:, 0]


MODELS = {"deepfm": DeepFM, "wide_deep": WideDeep, "dlrm": DLRM}


def write_day(path: Path, day: int, rows: int = ROWS) -> None:
    """Clicks that depend on two numbers and three categories; some ids are new on each day."""
    draw = np.random.default_rng(day)
    numbers = draw.random((rows, NUMBERS)).round(4)
    drawn = NEW * day + (draw.random((rows, CATEGORIES)) ** 3 * IDS).astype(int)
    ids = 100_000 * (1 + np.arange(CATEGORIES)) + drawn
    liked = np.sin(ids[:, :3] * 78.233) * 43758.5453 % 1 - 0.5
    score = 3 * (numbers[:, 0] - numbers[:, 1]) + 4 * liked.sum(axis=1) - 1.5
    clicks = draw.random(rows) < 1 / (1 + np.exp(-score))
    # Whole or not there at all: other ranks of the job write and read it too.
    with NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
        for click, row, own in zip(clicks, numbers, ids, strict=True):
            pairs = [f"{place + 1}:{value:g}" for place, value in enumerate(row)]
            file.write(f"{int(click)} {' '.join(pairs)} {' '.join(f'{id}:1' for id in own)}\n")
    Path(file.name).replace(path)


def schema_of(day: Path) -> flatout.data.Schema:
    """Of the logs, by their first day: each id that was seen twice gets a row."""
    if day.suffix == ".tsv":
        schema = flatout.data.criteo(day).schema
        return schema.with_ids(categories=Ids(admit=2, by_place=True))
    return flatout.data.libsvm(day, layout="fixed").schema.with_ids(ids=Ids(admit=2))


def train_day(
    kind: str,
    numbers: int,
    day: Path,
    schema: flatout.data.Schema,
    before: Path | None,
    epochs: int,
    out: Path,
) -> Path:
    """Train one day, after the day before; returns the run's folder."""
    read = flatout.data.criteo if schema.format == "criteo" else flatout.data.libsvm
    train, rest = read(day, schema=schema).split(0.9, by="order")
    torch.manual_seed(0)
    is_criteo = schema.format == "criteo"
    rows = Criteo() if is_criteo else Libsvm(schema["ids"].shape[0], numbers)
    run = out / "runs" / kind / day.stem
    trainer = flatout.Trainer(
        MODELS[kind](rows),
        loss="binary_cross_entropy",
        lr=0.002,
        metrics=["auc"],
        run=run,
        warm_start=before,
    )
    batches = train.shuffle(seed=1).batch(1024)
    history = trainer.fit(
        batches, validation_data=rest.batch(4096), epochs=epochs, resume=True, progress=False
    )
    trainer.save(out / f"{kind}.safetensors")
    print(history.summary())
    batches.explain()
    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("days", nargs="*", type=Path)
    parser.add_argument("--model", choices=MODELS, default="deepfm")
    parser.add_argument(
        "--numbers", type=int, default=NUMBERS, help="LibSVM fields, from the first"
    )
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path(), help="for runs and models")
    given = parser.parse_args()
    days = given.days or [Path("day-1.svm"), Path("day-2.svm")]
    if not given.days:
        for number, day in enumerate(days):
            write_day(day, number)
    schema, before = schema_of(days[0]), None
    for day in days:
        before = train_day(given.model, given.numbers, day, schema, before, given.epochs, given.out)


if __name__ == "__main__":
    main()
