"""Days of click logs whose ids grow, and a model over them, for the tests of ids."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import flatout
from flatout.data import Ids
from flatout.data.reading.schema import Column, Schema
from flatout.recipe import Recipe, Save

PLACES = 4


class Clicks(nn.Module):
    """A factorization machine: a weight and a vector for each id."""

    def __init__(self, rows: int = 300, width: int = 3) -> None:
        super().__init__()
        self.linear = nn.Embedding(rows, 1)
        self.factors = nn.Embedding(rows, width)
        nn.init.normal_(self.factors.weight, std=0.1)
        nn.init.zeros_(self.linear.weight)
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, ids: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Logits of shape (rows,)."""
        scaled = self.factors(ids) * values[..., None]
        pairs = (scaled.sum(1) ** 2 - (scaled**2).sum(1)).sum(1) / 2
        first: torch.Tensor = (self.linear(ids)[..., 0] * values).sum(1)
        return self.bias + first + pairs


def schema(*ids: Ids) -> Schema:
    """Of rows of four ids."""
    columns = (
        Column(name="label", dtype="float32", role="target"),
        Column(name="ids", dtype="int64", shape=(PLACES,), ids=ids or (Ids(),)),
        Column(name="values", dtype="float32", shape=(PLACES,)),
    )
    return Schema(format="libsvm", columns=columns, options={"base": 0})


def day_ids(day: int, rows: int = 240) -> np.ndarray:
    """Ids of a day: of each field some old ones and some that are new, far apart."""
    draw = np.random.default_rng(day)
    fresh = draw.integers(20 * day, 60 + 20 * day, (rows, PLACES))
    return fresh * 1_000_003 + np.arange(PLACES) * 10**12


def write_day(folder: Path, day: int, rows: int = 240) -> Path:
    """A day's log, as LibSVM."""
    path = folder / f"day-{day}.svm"
    lines = [
        f"{int((row // 1_000_003).sum() % 3 == 0)} " + " ".join(f"{id}:1" for id in row)
        for row in day_ids(day, rows)
    ]
    path.write_text("\n".join(lines) + "\n")
    return path


def trainer(model: nn.Module | None = None, **more: Any) -> flatout.Trainer:
    """Of such a model, which says nothing."""
    if model is None:
        torch.manual_seed(0)
        model = Clicks()
    given = {"loss": "binary_cross_entropy", "optimizer": "adam", "lr": 0.02, "metrics": ["auc"]}
    return flatout.Trainer(model, **{**given, "allow": "exact", "say": lambda line: None, **more})


def batches(path: Path, stated: Schema | None = None) -> tuple[Any, Any]:
    """A day's rows to train on, and its last ones."""
    source = flatout.data.libsvm(path, schema=stated or schema())
    train, held_out = source.split(0.75, by="order")
    return train.shuffle(seed=1).batch(32), held_out.batch(64)


class Stop(flatout.Callback):
    """Ends a fit as a crash would."""

    def __init__(self, at: int) -> None:
        self.at = at

    def on_step(self, state: Any) -> None:
        """Raise after one step."""
        if state.step == self.at:
            raise RuntimeError("crash")


def fit_day(folder: Path, runs: str, day: int, crash: int = 0, **more: Any) -> flatout.Trainer:
    """Train a day from where it stands, after the day before it, with a checkpoint every 2 steps.

    Args:
        folder: has the logs.
        runs: the folder of the runs in it.
        day: its number.
        crash: after this step.
        more: for the Trainer.
    """
    torch.manual_seed(0)
    job = trainer(
        Clicks(rows=20),
        run=folder / runs / str(day),
        recipe=Recipe(save=Save(every=2)),
        warm_start=folder / runs / str(day - 1) if day else None,
        **more,
    )
    train, held_out = batches(folder / f"day-{day}.svm", schema(Ids(admit=2, buckets=5)))
    given = {"epochs": 1, "callbacks": [Stop(crash)], "resume": True, "progress": False}
    job.fit(train, validation_data=held_out, **given)
    return job
