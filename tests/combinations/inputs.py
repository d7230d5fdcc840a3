"""Samples of all cases, in the forms for Flatout and in batches for a plain loop."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

import flatout
from combinations.calls import count
from combinations.models import CLASSES, WIDTH
from flatout.data.randomness import order

EPOCHS, HELD_OUT, SEED = 4, 21, 1
CLASS_WEIGHT = {0: 1.0, 1: 2.0, 2: 0.5}
SCHEMA = {
    "format": "libsvm",
    "options": {"base": 1, "features": WIDTH},
    "columns": [
        {"name": "label", "dtype": "int64", "role": "target"},
        {"name": "features", "dtype": "float32", "shape": [WIDTH]},
    ],
}


def batch_size(case: Any) -> int:
    return 12 if case.last == "whole" else 8


def samples(case: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return inputs, targets and weights to train on; inputs are whole numbers, padded with 0."""
    return _drawn(48 if case.last == "whole" else 43, 1)


def held_out() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return _drawn(HELD_OUT, 2)


def _drawn(n: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    draw = np.random.default_rng(seed)
    x = draw.integers(1, 10, (n, WIDTH)).astype("float32")
    x[::3, 8:] = 0
    y = (x[:, 0] // 3).astype("int64").clip(0, CLASSES - 1)
    return x, y, draw.integers(1, 5, n).astype("float32") / 2


def inputs_of(case: Any, x: Any) -> Any:
    """Return the inputs of the model, for numpy or torch."""
    return (x[..., :6], x[..., 6:]) if case.model == "two" else x


def targets_of(case: Any, x: Any, y: Any) -> Any:
    if case.model != "two":
        return y
    return {"kind": y, "size": x[..., :1] / 8}


def rows_of(case: Any, x: Any, y: Any, w: Any) -> tuple[Any, ...]:
    """Return inputs and targets, with weights if the case has them."""
    rows = (inputs_of(case, x), targets_of(case, x, y))
    return (*rows, w) if case.weights == "sample" else rows


# -- for a plain loop -----------------------------------------------------------------------------


def plain_batches(case: Any, epoch: int) -> Iterator[tuple[np.ndarray, ...]]:
    """Yield batches of (inputs, targets, weights) in the documented order."""
    size = batch_size(case)
    x, y, w = samples(case)
    if case.data in ("arrays", "tuple", "dataset", "dataset_log") and not case.is_compiled:
        rows = order(len(x), 0, epoch)
    elif case.data in ("files", "mapped", "cache", "batch_map"):
        rows = order(len(x), SEED, epoch)
    else:
        rows = np.arange(len(x))
    for start in range(0, len(x), size):
        chosen = rows[start : start + size]
        part = x[chosen], y[chosen], w[chosen]
        yield (centered(*part)) if case.data == "batch_map" else part


def centered(x: Any, y: Any, *w: Any) -> tuple[Any, ...]:
    """Return inputs that depend on all samples of their batch, as whole numbers."""
    return (x + (x.sum(0) % 3), y, *w)


# -- for Flatout ----------------------------------------------------------------------------------


class Rows(Dataset):
    def __init__(self, case: Any, rows: tuple[np.ndarray, ...], name: str = "getitem") -> None:
        # Plain values, by which Datasets are distinguished.
        self.model, self.weights, self.name = case.model, case.weights, name
        self.rows = [torch.from_numpy(one) for one in rows]

    def __len__(self) -> int:
        return len(self.rows[0])

    def __getitem__(self, number: int) -> tuple[Any, ...]:
        count(self.name)
        return rows_of(self, *(one[number] for one in self.rows))


class LoggedRows(Rows):
    """Rows that differ between ranks only in the name of a log."""

    def __init__(self, case: Any, rows: tuple[np.ndarray, ...], log: str) -> None:
        super().__init__(case, rows)
        self.log = log

    def __getitem__(self, number: int) -> tuple[Any, ...]:
        count(self.log)
        return super().__getitem__(number)


class Streamed(IterableDataset):
    def __init__(self, rows: Rows) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        for number in range(len(self.rows)):
            yield self.rows[number]


def given(case: Any, folder: Path, rank: int) -> dict[str, Any]:
    """Return the arguments of `fit` for the training data."""
    rows, size = samples(case), batch_size(case)
    if case.data == "arrays":
        x, y, w = (torch.from_numpy(one) for one in rows)
        data = {"x": inputs_of(case, x), "y": targets_of(case, x, y), "batch_size": size}
        return data | ({"sample_weight": w} if case.weights == "sample" else {})
    if case.data == "tuple":
        tensors = (torch.from_numpy(one) for one in rows)
        return {"x": rows_of(case, *tensors), "batch_size": size}
    if case.data in ("dataset", "dataset_log"):
        made = Rows(case, rows) if case.data == "dataset" else LoggedRows(case, rows, f"log{rank}")
        return {"x": made, "batch_size": size}
    if case.data == "loader":
        return {"x": DataLoader(Rows(case, rows), batch_size=size)}
    if case.data == "iterable":
        return {"x": DataLoader(Streamed(Rows(case, rows)), batch_size=size)}
    if case.data == "generator":
        return {"x": generator(case, rows, size)}
    return {"x": pipeline(case, folder, rank)}


def generator(case: Any, rows: tuple[np.ndarray, ...], size: int) -> Any:
    tensors = [torch.from_numpy(one) for one in rows]

    def batches() -> Iterator[tuple[Any, ...]]:
        count("passes")
        for start in range(0, len(tensors[0]), size):
            yield rows_of(case, *(one[start : start + size] for one in tensors))

    return batches


def pipeline(case: Any, folder: Path, rank: int) -> Any:
    """Return a pipeline of the training data."""
    rows = samples(case)
    size = batch_size(case)

    def made(x: Any, y: Any, *w: Any) -> tuple[Any, ...]:
        count("map")
        return (inputs_of(case, x), targets_of(case, x, y), *w)

    def whole(x: Any, y: Any, *w: Any) -> tuple[Any, ...]:
        count("map")
        x, y, *w = centered(x, y, *w)
        return (inputs_of(case, x), targets_of(case, x, y), *w)

    if case.data == "fifo":
        source = flatout.data.fifo(pipes(case, folder, rank), schema=SCHEMA)
        return (source.map(made) if case.model == "two" else source).batch(size)
    if case.data == "files":
        path = folder / f"rows-{rank}.svm"
        path.write_bytes(libsvm(*rows[:2]))
        source = flatout.data.libsvm(path, schema=SCHEMA)
        source = source.map(made) if case.model == "two" else source
    else:
        kept = rows if case.weights == "sample" else rows[:2]
        source = flatout.data.arrays(*kept)
        source = source if case.data == "batch_map" else source.map(made)
    source = source.cache() if case.data == "cache" else source
    source = source.shuffle(seed=SEED).batch(size)
    return source.map(whole) if case.data == "batch_map" else source


def libsvm(x: np.ndarray, y: np.ndarray) -> bytes:
    lines = (
        f"{label} " + " ".join(f"{n}:{v:g}" for n, v in enumerate(row, 1)) + "\n"
        for row, label in zip(x, y, strict=True)
    )
    return "".join(lines).encode()


def pipes(case: Any, folder: Path, rank: int) -> Path:
    """Make named pipes; each is written once, one for each epoch."""
    x, y, _ = samples(case)
    size, ranks = batch_size(case), case.ranks
    share = size // ranks
    # Each rank has its own pipe with its share of each batch.
    mine = (
        np.concatenate(
            [
                np.arange(start, start + size)[rank * share : (rank + 1) * share]
                for start in range(0, len(x) // size * size, size)
            ]
        )
        if ranks > 1
        else np.arange(len(x))
    )
    text = libsvm(x[mine], y[mine])
    name = folder / f"pipe-{rank}"
    for epoch in range(EPOCHS):
        path = Path(f"{name}_{epoch}")
        if not path.exists():
            os.mkfifo(path)

    def write() -> None:
        for epoch in range(EPOCHS):
            Path(f"{name}_{epoch}").write_bytes(text)

    threading.Thread(target=write, daemon=True).start()
    return name


def validation(case: Any) -> dict[str, Any]:
    """Return the arguments of `fit` for the validation data."""
    x, y, w = held_out()
    tensors = [torch.from_numpy(one) for one in (x, y, w)]
    kept = rows_of(case, *tensors)
    if case.validation == "arrays":
        return {"validation_data": kept}
    if case.validation == "steps":
        steps = {"validation_steps": 2, "validation_batch_size": 5}
        return {"validation_data": kept[:2], **steps}
    if case.validation == "loader":
        rows = Rows(case, (x, y, w), "held_out")
        return {"validation_data": DataLoader(rows, batch_size=5)}
    if case.validation == "pipeline":

        def made(x: Any, y: Any, *w: Any) -> tuple[Any, ...]:
            return (inputs_of(case, x), targets_of(case, x, y), *w)

        arrays = (x, y, w) if case.weights == "sample" else (x, y)
        return {"validation_data": flatout.data.arrays(*arrays).map(made).batch(5)}
    return {}
