"""Facts about the ids of data, field by field: their number, their skew, and new ids."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from flatout.data.reading.block import Block, Numbers, Ragged
from flatout.data.reading.schema import Column
from flatout.kernels import IdNumbers, Items
from flatout.measure import available_bytes
from flatout.words import rounded

# Maximum number of positions in a column's rows that count as separate fields. Columns with more
# positions hold texts or images.
_MOST_FIELDS = 128
# Number of ids up to which a field gets a row for each id, without other advice.
_FEW = 1000
# Fraction of values with unknown ids from which on the advice is to hash new ids.
_MANY_UNKNOWN = 0.2
# Minimum number of buckets that the advice names.
_FEWEST_BUCKETS = 1024
HASH = 'hash, few ids come again: vocabulary = "none"'
"""Advice for a field in which few ids occur more than once: its ids should share rows."""


@dataclass(frozen=True)
class FieldFacts:
    """The ids of one field.

    Attributes:
        name: name of the column; with the position, such as "ids[3]", if each position is a field.
        values: number of values, in which an id may occur several times.
        ids: number of different ids.
        once: number of ids that occur once.
        top: the most frequent id.
        top_share: fraction of values that are the most frequent id.
        half: number of most frequent ids that make up half of the values.
        unknown_ids: number of ids that the other data do not have; None without other data.
        unknown_share: fraction of values whose id the other data do not have.
        todo: advice for the schema.
    """

    name: str
    values: int
    ids: int
    once: int
    top: int
    top_share: float
    half: int
    unknown_ids: int | None
    unknown_share: float | None
    todo: str

    @property
    def words(self) -> tuple[str, ...]:
        """Texts of name, ids, ids that occur once, top id, `half`, unknown ids, and advice."""
        unknown = ""
        if self.unknown_share is not None:
            unknown = _share(self.unknown_share)
        return (
            self.name,
            f"{self.ids:,}",
            _share(self.once / self.ids),
            f"{self.top} {_share(self.top_share)}",
            f"{self.half:,}",
            unknown,
            self.todo.replace(HASH, "hash"),
        )


class IdFields:
    """Counts the ids of all int64 inputs. Several threads may add blocks.

    Attributes:
        dropped: names of columns with more different ids than fit into memory.
    """

    def __init__(self, columns: Iterable[Column], base: int = 0) -> None:
        self._base = base
        self._counts: dict[str, IdNumbers] = {}
        self._places: dict[str, Numbers] = {}
        self._lock = threading.Lock()
        self.dropped: list[str] = []
        for column in columns:
            if column.role == "input" and column.dtype == "int64" and len(column.shape) < 2:
                width = column.shape[0] if column.shape else 1
                width = width if width <= _MOST_FIELDS else 1
                self._places[column.name] = np.arange(width, dtype=np.int64)
                self._counts[column.name] = IdNumbers()

    @property
    def names(self) -> list[str]:
        return list(self._counts)

    def add(self, block: Block) -> None:
        with self._lock:
            for name in list(self._counts):
                self._add(name, block.columns[name])

    def _add(self, name: str, values: Any) -> None:
        if isinstance(values, Ragged):
            values = values.values[values.offsets[0] : values.offsets[-1]]
        ids, numbers = np.ascontiguousarray(values), self._counts[name]
        if len(self._places[name]) == 1:
            ids = ids.reshape(-1)
        if numbers.bytes_to_add(ids.size) > available_bytes():
            del self._counts[name]
            self.dropped.append(name)
        else:
            numbers.add(ids, self._places[name])

    def facts(self, other: IdFields | None = None) -> list[FieldFacts]:
        facts = []
        for name, numbers in self._counts.items():
            theirs = None if other is None else other._counts.get(name)
            known = None
            if other is not None and theirs is not None:
                known = dict(_apart(theirs.items(), other._base))
            is_one = len(self._places[name]) == 1
            for place, items in _apart(numbers.items(), self._base):
                field = name if is_one else f"{name}[{place}]"
                facts.append(_facts(field, items, None if known is None else known.get(place)))
        return facts


def _apart(items: Items, base: int) -> Iterator[tuple[int, Items]]:
    items = items._replace(ids=items.ids + base)
    fields, starts = np.unique(items.fields, return_index=True)
    ends = [*starts.tolist()[1:], len(items.fields)]
    for field, start, end in zip(fields.tolist(), starts.tolist(), ends, strict=True):
        yield field, Items(*(part[start:end] for part in items))


def _facts(name: str, items: Items, known: Items | None) -> FieldFacts:
    counts = items.numbers
    values, ids = int(counts.sum()), len(counts)
    top = int(counts.argmax())
    half = int(np.searchsorted(np.cumsum(np.sort(counts)[::-1]), values / 2)) + 1
    once = int((counts == 1).sum())
    unknown_ids, unknown_share = None, None
    if known is not None:
        new = ~np.isin(items.ids, known.ids, assume_unique=True)
        unknown_ids, unknown_share = int(new.sum()), float(counts[new].sum() / values)
    return FieldFacts(
        name=name,
        values=values,
        ids=ids,
        once=once,
        top=int(items.ids[top]),
        top_share=float(counts[top] / values),
        half=half,
        unknown_ids=unknown_ids,
        unknown_share=unknown_share,
        todo=_todo(values, ids, once, unknown_share),
    )


def _todo(values: int, ids: int, once: int, unknown: float | None) -> str:
    if ids == 1 and values > 1:
        return "constant"
    buckets = max(_FEWEST_BUCKETS, 1 << max(0, ids - once - 1).bit_length())
    if ids > _FEW and ids > values / 2:
        return f"{HASH}, buckets = {buckets}"
    if ids > _FEW and once > ids / 2:
        return f"admit = 2: {ids - once:,} rows, {_share(once / values)} of the values unknown"
    if ids > _FEW and unknown is not None and unknown >= _MANY_UNKNOWN:
        return f"hash what is new: buckets = {buckets}"
    return "a row for each"


def _share(share: float) -> str:
    return f"{rounded(100 * share, 3)}%"
