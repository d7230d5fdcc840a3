"""Rows that come several times in an epoch: each time is a turn, with random numbers of its own."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from flatout.data.block import Numbers

Turns: TypeAlias = int | Numbers
"""The number of the epoch; or for each of some rows one that tells its turns apart, int64 of shape
(rows,), which is the epoch's for the first."""

# Between the turns of a row; epochs are fewer.
_APART = 1 << 32


def turns_of(order: Numbers, epoch: int) -> Numbers | None:
    """The turn of each row of an epoch; None where none comes twice."""
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
    """Those of some of the rows, by their places or by a bool for each."""
    return turns if isinstance(turns, int) else turns[chosen]


def turns_left(turns: Turns, numbers: Numbers, left: Numbers) -> Turns:
    """Those of the rows that could be read."""
    return turns if isinstance(turns, int) else turns[places_left(numbers, left)]


def places_left(numbers: Numbers, left: Numbers) -> Numbers:
    """Where among some rows those are that could be read, in the same order."""
    if len(left) == len(numbers):
        return np.arange(len(numbers))
    places: list[int] = []
    for place, number in enumerate(numbers.tolist()):
        if len(places) < len(left) and left[len(places)] == number:
            places.append(place)
    return np.array(places, np.int64)
