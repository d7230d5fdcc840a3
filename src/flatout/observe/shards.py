"""Which part of a dataset a rank or a worker of a loader takes, by the first samples it has had."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import reduce
from math import gcd
from typing import Any

from flatout.observe.held_items import held_by, length_of
from flatout.observe.samples import behind_subsets, is_in_memory, row_numbers

ENOUGH = 32
"""Samples of a part that are looked at."""
# Of fewer samples nothing is told; and of a longer table.
_FEWEST, _ROWS = 16, 2**16
# Share of a worker's samples that have to be rows of what its dataset holds.
_MOST = 0.9


def part_of(positions: Sequence[int]) -> tuple[int, int] | None:
    """Of samples in any order: they are each n-th of a dataset, from which one on."""
    if len(positions) < _FEWEST:
        return None
    each = reduce(gcd, (position - positions[0] for position in positions))
    return (positions[0] % each, each) if each > 1 else (0, 1)


def parts_of_indices(dataset: Any, firsts: Iterable[Sequence[int]]) -> list[tuple[int, int] | None]:
    """The part that the first samples of each epoch are of, by their numbers."""
    _, picked = behind_subsets(dataset)
    return [
        part_of([picked[index] for index in first] if picked is not None else first)
        for first in firsts
    ]


def parts_of_rows(
    dataset: Any, rows: Iterable[Sequence[int]]
) -> tuple[int, list[tuple[int, int] | None]] | None:
    """The part that each worker's first samples are of, by the rows of what a stream holds."""
    for table in _tables_in(dataset):
        numbers = row_numbers(table, range(len(table))) or []
        often = Counter(numbers)
        row_of = {number: place for place, number in enumerate(numbers) if often[number] == 1}
        places = [[row_of[number] for number in of if number in row_of] for of in rows]
        pairs = zip(places, rows, strict=True)
        if all(len(a) >= _MOST * len(b) for a, b in pairs):
            return len(numbers), [part_of(of) for of in places]
    return None


def _tables_in(dataset: Any) -> Iterator[Any]:
    for value in held_by(dataset):
        if is_in_memory(value) and value.ndim > 1 and _FEWEST < len(value) <= _ROWS:
            yield value


def block_of(dataset: Any) -> tuple[int, int, int] | None:
    """Of a Subset whose samples follow one another: the first, how many, and of how many."""
    indices, whole = getattr(dataset, "indices", None), getattr(dataset, "dataset", None)
    if indices is None or whole is None or len(indices) < _FEWEST:
        return None
    picked = [int(index) for index in indices]
    follow = picked == [*range(picked[0], picked[0] + len(picked))]
    length = length_of(whole)
    return (picked[0], len(picked), length) if follow and length else None
