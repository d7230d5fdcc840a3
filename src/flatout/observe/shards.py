"""Part of a dataset that a rank or a worker reads, inferred from its first samples."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import reduce
from math import gcd
from typing import Any

from flatout.observe.held_items import held_by, length_of
from flatout.observe.samples import behind_subsets, is_in_memory, row_numbers

ENOUGH = 32
"""Number of first samples of a rank's or worker's part that are recorded."""
# _FEWEST: minimum number of samples of a part; a table needs more rows than this; _ROWS: maximum
# number of rows of a table.
_FEWEST, _ROWS = 16, 2**16
# Smallest share of a worker's samples that must be rows of a tensor of its dataset.
_MOST = 0.9


def part_of(positions: Sequence[int]) -> tuple[int, int] | None:
    """Return (remainder, n) if these indices, in any order, are every n-th index of a dataset."""
    if len(positions) < _FEWEST:
        return None
    each = reduce(gcd, (position - positions[0] for position in positions))
    return (positions[0] % each, each) if each > 1 else (0, 1)


def parts_of_indices(dataset: Any, firsts: Iterable[Sequence[int]]) -> list[tuple[int, int] | None]:
    """Return the part of the first samples of each epoch, from their indices."""
    _, picked = behind_subsets(dataset)
    return [
        part_of([picked[index] for index in first] if picked is not None else first)
        for first in firsts
    ]


def parts_of_rows(
    dataset: Any, rows: Iterable[Sequence[int]]
) -> tuple[int, list[tuple[int, int] | None]] | None:
    """Return the part of each worker's first samples, from the rows of a stream's table."""
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
    """Return the first index and length of a Subset of consecutive samples, and the full length.

    None for other datasets.
    """
    indices, whole = getattr(dataset, "indices", None), getattr(dataset, "dataset", None)
    if indices is None or whole is None or len(indices) < _FEWEST:
        return None
    picked = [int(index) for index in indices]
    follow = picked == [*range(picked[0], picked[0] + len(picked))]
    length = length_of(whole)
    return (picked[0], len(picked), length) if follow and length else None
