"""Facts about the columns of rows, counted block by block."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from flatout.data.reading.block import Block, Ragged, Values
from flatout.data.stores.row_store import row_bytes

# Maximum number of different labels that are taken for classes.
_MOST_CLASSES = 10_000
_PERCENTILES = (0, 50, 90, 99, 100)


class ColumnRange(NamedTuple):
    """Facts about one column of one block.

    Attributes:
        low: the smallest value that is not NaN.
        high: the largest value that is not NaN.
        lengths: number of rows of each length, if rows are ragged.
    """

    low: float
    high: float
    lengths: Counter[int]


class Labels(NamedTuple):
    """The targets of one block.

    Attributes:
        rows: number of targets.
        counts: number of times that each target occurs.
        first: target of the first row.
        last: target of the last row.
        changes: number of rows whose target differs from the row before.
        sum: sum of the targets.
    """

    rows: int
    counts: Counter[float]
    first: float
    last: float
    changes: int
    sum: float


class Counted(NamedTuple):
    rows: int
    bytes: float
    columns: dict[str, ColumnRange]
    labels: Labels | None


def count(block: Block, target: str | None) -> Counted | None:
    """Return facts about a block, or None if it has no rows. Several threads may call this."""
    if not len(block):
        return None
    columns = {name: _part(values) for name, values in block.columns.items()}
    values = None if target is None else block.columns.get(target)
    labels = None
    if isinstance(values, np.ndarray) and values.size == len(block):
        labels = _labels(values.reshape(-1))
    return Counted(len(block), row_bytes(block) * len(block), columns, labels)


def _part(values: Values) -> ColumnRange:
    flat = values.values if isinstance(values, Ragged) else values
    lengths: Counter[int] = Counter()
    if isinstance(values, Ragged):
        flat = flat[values.offsets[0] : values.offsets[-1]]
        result, counts = np.unique(np.diff(values.offsets), return_counts=True)
        lengths.update(dict(zip(result.tolist(), counts.tolist(), strict=True)))
    if not flat.size:
        return ColumnRange(np.inf, -np.inf, lengths)
    # Python's int, since float64 cannot hold all digits of an int64.
    low, high = np.fmin.reduce(flat, axis=None), np.fmax.reduce(flat, axis=None)
    return ColumnRange(low.item(), high.item(), lengths)


def _labels(values: npt.NDArray[Any]) -> Labels:
    labels, counts = np.unique(values, return_counts=True)
    pairs = zip(labels.tolist(), counts.tolist(), strict=True)
    return Labels(
        len(values),
        Counter(dict(pairs)),
        values[0].item(),
        values[-1].item(),
        int((values[1:] != values[:-1]).sum()),
        float(values.sum(dtype=np.float64)),
    )


@dataclass
class ColumnCounts:
    """Facts about all blocks, which are added in their order.

    Attributes:
        labels: number of times that each target occurs; None if there is no target, or more
            than _MOST_CLASSES different ones.
    """

    rows: int = 0
    bytes: float = 0.0
    columns: dict[str, ColumnRange] = field(default_factory=dict)
    labels: Counter[float] | None = field(default_factory=Counter)
    target_sum: float = 0.0
    _labeled: int = 0
    _changes: int = 0
    _last: float | None = None

    def add(self, counted: Counted) -> None:
        self.rows += counted.rows
        self.bytes += counted.bytes
        for name, part in counted.columns.items():
            before = self.columns.get(name, ColumnRange(np.inf, -np.inf, Counter()))
            self.columns[name] = ColumnRange(
                min(before.low, part.low), max(before.high, part.high), before.lengths
            )
            before.lengths.update(part.lengths)
        self._add_labels(counted.labels)

    def _add_labels(self, labels: Labels | None) -> None:
        if labels is None:
            self.labels = None
            return
        self._labeled += labels.rows
        self.target_sum += labels.sum
        self._changes += labels.changes
        self._changes += self._last is not None and self._last != labels.first
        self._last = labels.last
        if self.labels is not None:
            self.labels.update(labels.counts)
            if len(self.labels) > _MOST_CLASSES:
                self.labels = None

    def only_labels(self, targets: npt.NDArray[Any] | None) -> None:
        """Replace all counts of targets by counts of `targets`, the targets of all rows."""
        self.labels, self._changes, self._last, self.target_sum = Counter(), 0, None, 0.0
        self._labeled = 0
        self._add_labels(None if targets is None else _labels(targets))

    @property
    def mean(self) -> float | None:
        return (
            None
            if self.classes is not None or not self._labeled
            else self.target_sum / self._labeled
        )

    @property
    def classes(self) -> dict[int, int] | None:
        if not self.labels or any(label != int(label) for label in _finite(self.labels)):
            return None
        return {int(label): self.labels[label] for label in sorted(self.labels)}

    @property
    def sorted_by_class(self) -> bool:
        classes = self.classes
        return classes is not None and 2 <= len(classes) == self._changes + 1 < self._labeled


def _finite(labels: Counter[float]) -> list[float]:
    return [label if np.isfinite(label) else 0.5 for label in labels]


def percentiles(lengths: Counter[int]) -> dict[int, int]:
    """Return the lengths that 0, 50, 90, 99 and 100 percent of the rows do not exceed."""
    sizes = np.array(sorted(lengths))
    upto = np.cumsum([lengths[int(size)] for size in sizes])
    return {
        share: int(sizes[np.searchsorted(upto, max(1, np.ceil(upto[-1] * share / 100)))])
        for share in _PERCENTILES
    }
