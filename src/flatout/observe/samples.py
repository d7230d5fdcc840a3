"""Samples and labels that a dataset holds in memory, and their order."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import prod
from typing import Any

from flatout.observe.chance import RICH, bits_of
from flatout.observe.generators import reached_from
from flatout.observe.held_items import (
    held_by,
    length_of,
    numbers_of_frame,
    numbers_of_items,
    numbers_of_names,
    of_all_samples,
    table_of_items,
)
from flatout.observe.spread import Spread, spread_of

# _ROWS: maximum number of samples whose bytes are hashed; _COLUMNS: maximum number of values
# hashed of each sample.
_ROWS, _COLUMNS = 2**16, 128
# _STEPS: minimum number of time steps of a window; _OF_WINDOWS: maximum number of values of all
# windows that are hashed.
_STEPS, _OF_WINDOWS = 8, 2**23
# Minimum number of columns of a row of statistics: shorter rows may be equal by chance.
_FIGURES = 2
# Multiplier of the hash of windows.
_ODD = 0x9E3779B97F4A7C15
# Maximum number of labels of a dataset that are read.
_LABELS = 2**18
# Maximum number of different labels that count as classes.
_CLASSES = 10_000
_NAMES = ("targets", "labels", "y")
_LABEL_COLUMNS = (*_NAMES, "target", "label", "class")


# _NUMBERS: maximum number of values of a table for which means are computed; _OF_SPREAD: maximum
# number of values for which ends are computed; _AT_ONCE: number of rows per chunk of both
# computations.
_NUMBERS, _OF_SPREAD, _AT_ONCE = 2**26, 2**23, 2**13


@dataclass(frozen=True)
class Moments:
    """Mean, variance and ends of the columns of a table.

    Attributes:
        count: number of rows.
        mean, variance: one float64 array each, by column.
        spread: the ends between which columns lie; None for wide rows, and for too many values.
    """

    count: int
    mean: Any
    variance: Any
    spread: Spread | None = None

    def is_of_same(self, other: Moments | None) -> bool:
        """Return whether counts, means and variances are equal, as for moments of the same rows."""
        return (
            other is not None
            and self.count == other.count
            and self.mean.shape == other.mean.shape
            and bool((self.mean == other.mean).all() and (self.variance == other.variance).all())
        )

    def with_others(self, other: Moments) -> Moments:
        """Return the moments of the rows of both tables together."""
        count = self.count + other.count
        mean = (self.count * self.mean + other.count * other.mean) / count
        squares = [item.count * (item.variance + item.mean**2) for item in (self, other)]
        spread = self.spread and other.spread and self.spread.with_others(other.spread)
        return Moments(count, mean, sum(squares) / count - mean**2, spread)


@dataclass(frozen=True)
class Samples:
    """Fingerprints and statistics of the samples of a training or validation set.

    Attributes:
        rows: a hash of the bytes of each of at most _ROWS samples; None where the samples are not
            accessible.
        moments: Moments of all samples; None for integers, and for too many values.
        is_named: whether `rows` are hashes of the files that samples are read from.
        series: the series that the samples are windows of, as [steps, columns]; None without a
            series.
        whole: a longer series of the script that contains `series`; None without such a series.
        windows: where samples can be windows of a series, two hashes of each sample: a hash of all
            time steps but the last, and a hash of all time steps but the first; None otherwise.
        bits: upper limit of the bits that distinguish samples. Where the limit is small, samples
            may be equal by chance.
        of_all: moments of all rows of the table from which the samples are picked; None where the
            samples are the whole table.
        figures: short rows of numbers that the dataset refers to, such as means by column.
    """

    rows: list[int] | None
    moments: Moments | None
    is_named: bool = False
    series: Any = None
    whole: Any = None
    windows: list[tuple[int, int]] | None = None
    bits: float = RICH
    of_all: Moments | None = None
    figures: list[Any] = field(default_factory=list)

    @property
    def rich_rows(self) -> list[int] | None:
        """`rows`; None where they may be equal by chance."""
        return self.rows if self.bits >= RICH else None


def samples_of(dataset: Any) -> Samples | None:
    """Return the samples that a dataset holds in memory, or the names of their files; else None."""
    inner, picked = behind_subsets(dataset)
    table = _table_in(inner)
    if table is None:
        table, picked = _picked_in(inner, picked)
    if table is not None:
        known = samples_in(table, picked)
        return replace(
            known,
            of_all=None if picked is None else _moments(table, range(len(table))),
            figures=_figures_in(inner, prod(table.shape[1:])),
        )
    table = table_of_items(inner, picked)
    if table is not None:
        return samples_in(table)
    rows = numbers_of_items(inner, picked)
    if rows is not None:
        return Samples(rows, None)
    named = numbers_of_names(inner, picked)
    if named is not None:
        return Samples(named, None, is_named=True)
    rows, bits = numbers_of_frame(inner, picked)
    return None if rows is None else Samples(rows, None, bits=bits)


def _picked_in(dataset: Any, picked: Sequence[int] | None) -> tuple[Any, Sequence[int] | None]:
    tables = [item for item in held_by(dataset) if is_in_memory(item) and item.ndim > 1]
    length = length_of(dataset) or 0
    if len(tables) != 1 or len(tables[0]) <= length:
        return None, picked
    for item in of_all_samples(dataset, lambda value: hasattr(value, "__getitem__")):
        numbers = as_array(item) if is_in_memory(item) else item
        rows = numbers.tolist() if hasattr(numbers, "tolist") else numbers
        if not isinstance(rows, list) or not all(type(row) is int for row in rows):
            continue
        # Sample indices are unique, labels are not.
        if len({*rows}) == length and min(rows) >= 0 and max(rows) < len(tables[0]):
            return tables[0], rows if picked is None else [rows[at] for at in picked]
    return None, picked


def _figures_in(dataset: Any, width: int) -> list[Any]:
    def is_row(value: Any) -> bool:
        return is_in_memory(value) and prod(value.shape) == width and len(value.shape) < 3

    if width < _FIGURES or type(dataset).__module__.startswith("torch."):
        return []
    found = [as_array(value) for _, value in reached_from(dataset, is_row)]
    return [value.reshape(-1) for value in found if value.dtype.kind == "f"]


def samples_in(table: Any, picked: Sequence[int] | None = None) -> Samples:
    """Return the Samples of a tensor or array, or of its picked rows."""
    chosen = range(len(table)) if picked is None else picked
    rows = _rows(table, chosen[:: max(1, -(-len(chosen) // _ROWS))])
    return Samples(
        _numbers_of(rows),
        _moments(table, chosen),
        windows=_windows(table, chosen),
        bits=bits_of(rows),
    )


def _windows(table: Any, chosen: Sequence[int]) -> list[tuple[int, int]] | None:
    steps = table.shape[1] if table.ndim in (2, 3) else 0
    if steps < _STEPS or len(chosen) * prod(table.shape[1:]) > _OF_WINDOWS:
        return None
    rows = as_array(table[list(chosen)])
    rows = rows.astype("float32" if rows.dtype.kind == "f" else "int64")
    if not len(rows) or bits_of(rows.reshape(len(rows), -1)[:, :_COLUMNS]) < RICH:
        return None
    before, after = _sums(rows[:, :-1]), _sums(rows[:, 1:])
    return list(zip(before.tolist(), after.tolist(), strict=True))


def _sums(rows: Any) -> Any:
    import numpy as np

    bits = np.ascontiguousarray(rows).view("uint32").reshape(len(rows), -1).astype("uint64")
    odd = np.arange(1, 2 * bits.shape[1], 2, dtype="uint64") * np.uint64(_ODD)
    return (bits * (odd ^ (odd >> np.uint64(29)) | np.uint64(1))).sum(1)


def numbers_at(dataset: Any, indices: Sequence[int]) -> list[int] | None:
    """Return a hash of the bytes of each of these samples, the same in each process.

    None where samples may be equal by chance, or are not accessible.
    """
    inner, picked = behind_subsets(dataset)
    table = _table_in(inner)
    if table is None:
        return None
    return row_numbers(table, indices if picked is None else [picked[index] for index in indices])


def number_of_bytes(data: bytes) -> int:
    """Return a hash of the bytes that is the same in each process, unlike `hash`."""
    return zlib.crc32(data) << 32 | zlib.adler32(data)


def row_numbers(table: Any, chosen: Sequence[int]) -> list[int] | None:
    """Return a hash of the bytes of each of these rows; None where they may be equal by chance."""
    rows = _rows(table, chosen)
    return _numbers_of(rows) if len(rows) and bits_of(rows) >= RICH else None


def numbers_in(batch: Any) -> list[int]:
    """Return a hash of each row of a batch, even where rows may be equal by chance."""
    return _numbers_of(_rows(batch, range(len(batch))))


def _numbers_of(rows: Any) -> list[int]:
    return [number_of_bytes(row.tobytes()) for row in rows]


def _rows(table: Any, chosen: Sequence[int]) -> Any:
    columns = table.reshape(len(table), -1)
    columns = columns[:, :: max(1, -(-columns.shape[1] // _COLUMNS))]
    rows = as_array(columns[list(chosen)])
    return rows.astype("float32") if rows.dtype.kind == "f" else rows


def _moments(table: Any, chosen: Sequence[int]) -> Moments | None:
    numbers = len(chosen) * prod(table.shape[1:])
    if numbers > _NUMBERS:
        return None
    has_spread = table.ndim == 2 and numbers <= _OF_SPREAD
    moments: Moments | None = None
    for first in range(0, len(chosen), _AT_ONCE):
        chunk = chosen[first : first + _AT_ONCE]
        part = table[chunk.start : chunk.stop] if isinstance(chunk, range) else table[list(chunk)]
        rows = as_array(part.reshape(len(part), -1))
        if rows.dtype.kind != "f":
            return None
        own = moments_of(rows)
        own = replace(own, spread=spread_of(rows)) if has_spread else own
        moments = own if moments is None else moments.with_others(own)
    return moments


def moments_of(rows: Any) -> Moments:
    """Return the moments of an array of floats, rows by columns."""
    return Moments(len(rows), rows.mean(0, dtype="float64"), rows.var(0, dtype="float64"))


def labels_of(dataset: Any) -> list[int] | None:
    """Return the class labels that a dataset holds, in its order; None without labels."""
    held, picked = behind_subsets(dataset)
    labels = _labels_in(held)
    if labels is None or len(labels) > _LABELS:
        return None
    values = as_array(labels)
    if values.dtype.kind == "f" and prod(values.shape[1:]) == 1:
        column = values.reshape(-1)
        if ((column == 0) | (column == 1)).all():  # the form that losses of two classes take
            values = column.astype("int8")
    if values.dtype.kind not in "iub" or values.ndim != 1:
        return None
    result: list[int] = values.tolist() if picked is None else values[list(picked)].tolist()
    return result


def label_runs(labels: Sequence[int] | None) -> tuple[int, int, int, int] | None:
    """Return the number of classes, runs of one class, samples, and samples of the second class.
    The second class has the second largest number of samples. None for numbers that cannot be
    classes."""
    sizes = Counter(labels or ()).most_common()
    if labels is None or len(sizes) < 2 or len(sizes) > min(_CLASSES, len(labels) // 2):
        return None
    runs = 1 + sum(item != other for item, other in pairwise(labels))
    return len(sizes), runs, len(labels), sizes[1][1]


def behind_subsets(dataset: Any) -> tuple[Any, Sequence[int] | None]:
    """Return the dataset inside of nested Subsets, and the indices that they pick from it."""
    picked: Sequence[int] | None = None
    for _ in range(8):
        indices = getattr(dataset, "indices", None)
        if indices is None or not hasattr(dataset, "dataset"):
            break
        own = [int(index) for index in indices]
        picked = own if picked is None else [own[index] for index in picked]
        dataset = dataset.dataset
    return dataset, picked


def _table_in(dataset: Any) -> Any:
    tensors = getattr(dataset, "tensors", None)
    if isinstance(tensors, tuple):
        parts = list(tensors)[:1]
    elif type(dataset).__module__.startswith("keras."):
        parts = [_first_of_keras(dataset)]
    else:
        parts = _held(dataset)
    # The first of several tensors is the model's input, such as images before their masks.
    return next((part for part in parts if is_in_memory(part) and part.ndim > 1), None)


def _first_of_keras(dataset: Any) -> Any:
    value = getattr(dataset, "array", None)
    while isinstance(value, (tuple, list, dict)) and value:
        value = next(iter(value.values())) if isinstance(value, dict) else value[0]
    return getattr(value, "array", None)


def _targets_of_keras(dataset: Any) -> Any:
    parts = getattr(dataset, "array", None)
    if not (isinstance(parts, tuple) and parts[1:]):
        return None
    values: Any = getattr(parts[1], "array", None)
    is_column = is_in_memory(values) and values.ndim > 0 and prod(values.shape[1:]) == 1
    return values.reshape(-1) if is_column else None


def _labels_in(dataset: Any) -> Any:
    tensors = getattr(dataset, "tensors", None)
    if isinstance(tensors, tuple):
        return tensors[-1] if len(tensors) > 1 else None
    if type(dataset).__module__.startswith("keras."):
        return _targets_of_keras(dataset)
    given = [vars(dataset).get(name) for name in _NAMES] if hasattr(dataset, "__dict__") else []
    length = length_of(dataset) or None
    for item in given:
        if isinstance(item, list) and len(item) == length and isinstance(item[0], int):
            return item
        if is_in_memory(item) and item.ndim == 1 and len(item) == length:
            return item
    for frame in vars(dataset).values() if hasattr(dataset, "__dict__") else ():
        if type(frame).__name__ == "DataFrame" and len(frame) == length:
            names = [name for name in frame.columns if str(name).lower() in _LABEL_COLUMNS]
            return frame[names[0]].to_numpy() if names else None
    return None


def _held(dataset: Any) -> list[Any]:
    return list(of_all_samples(dataset, is_in_memory))


def is_in_memory(value: Any) -> bool:
    """Return whether the value is a dense tensor or numpy array of numbers."""
    import numpy as np
    import torch

    if torch.is_tensor(value):
        return not value.is_meta and value.layout == torch.strided
    return type(value) is np.ndarray and value.dtype.kind in "iufb"


def as_array(values: Any) -> Any:
    """Return a tensor or array as numpy array; tensors with 16-bit elements become float32."""
    import numpy as np

    if hasattr(values, "detach"):
        values = values.detach().cpu()
        return (values.float() if values.dtype.itemsize == 2 else values).numpy()
    return np.asarray(values)
