"""Rows that occur several times in an epoch. Each time is a turn, with its own random numbers."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from flatout.data.reading.block import Numbers

Turns: TypeAlias = int | Numbers
"""The epoch's index, or one int64 for each row, of shape (rows,), that differs between a row's
occurrences in an epoch (turns). It is the epoch's index for a row's first occurrence."""

# A turn's value is epoch + _APART * (number of earlier occurrences of the row in the epoch). A run
# has fewer epochs than _APART.
_APART = 1 << 32


def turns_of(order: Numbers, epoch: int) -> Numbers | None:
    """Return the turn of each row of an epoch, or None if no row occurs twice."""
    by_row = np.argsort(order, kind="stable")
    rows = order[by_row]
    starts = np.flatnonzero(np.diff(rows, prepend=-1))
    if len(starts) == len(rows):
        return None
    lengths = np.diff(starts, append=len(rows))
    times = np.empty(len(rows), np.int64)
    times[by_row] = np.arange(len(rows)) - np.repeat(starts, lengths)
    return epoch + _APART * times


def turns_at(turns: Turns, chosen: slice | npt.NDArray[Any]) -> Turns:
    """Return the turns of some rows, chosen by positions or by a bool for each row."""
    return turns if isinstance(turns, int) else turns[chosen]


def turns_left(turns: Turns, numbers: Numbers, left: Numbers) -> Turns:
    """Return the turns of the rows that could be read."""
    return turns if isinstance(turns, int) else turns[places_left(numbers, left)]


def places_left(numbers: Numbers, left: Numbers) -> Numbers:
    """Return the positions, in `numbers`, of the rows that could be read, in the same order."""
    if len(left) == len(numbers):
        return np.arange(len(numbers))
    places: list[int] = []
    for place, number in enumerate(numbers.tolist()):
        if len(places) < len(left) and left[len(places)] == number:
            places.append(place)
    return np.array(places, np.int64)
