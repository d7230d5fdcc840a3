"""Lines about values that reading has changed: one line for each changed column."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt

from flatout.data.reading.origins import Gather, alone

Lines = dict[str, str]

# Name of a change: a float dtype has rounded a whole number.
ROUNDED = "rounded"

_numbers = itertools.count()
# All Changes objects by key. A copy in a worker process has the key of its original.
_here: WeakValueDictionary[tuple[int, int], Changes] = WeakValueDictionary()


class Changes:
    """The columns in which reading has changed a value. Several threads may call it at once."""

    def __init__(self) -> None:
        self._key = (os.getpid(), next(_numbers))
        self._lines: Lines = {}
        self._expected: set[tuple[str, str]] = set()
        self._reported: set[str] = set()
        _here[self._key] = self

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        _here[self._key] = self

    def watches(self, column: str, change: str) -> bool:
        """Return whether no change of the column was noted yet, and this change is not expected."""
        return column not in self._lines and (column, change) not in self._expected

    def expect(self, column: str, change: str) -> None:
        """Ignore this change of this column from now on, because the user expects it."""
        self._expected.add((column, change))

    def add(self, column: str, line: str) -> None:
        self._lines.setdefault(column, line)

    def notes(self) -> list[str]:
        return list(self._lines.values())

    def new_notes(self, gather: Gather = alone) -> list[str]:
        """Return the lines that any rank has found since the last call. All ranks call it."""
        new: Lines = {}
        for found in gather(self._unreported()):
            new = {**found, **new}
        self._lines.update(new)
        self._reported.update(new)
        return list(new.values())

    def _unreported(self) -> Lines:
        lines = self._lines.copy()
        return {column: lines[column] for column in lines if column not in self._reported}


def found_here() -> dict[tuple[int, int], Lines]:
    """Return the lines that this worker process has found, for `take_over` in its parent."""
    return {key: lines for key, one in list(_here.items()) if (lines := one._unreported())}


def take_over(found: Mapping[tuple[int, int], Lines]) -> None:
    """Keep the lines that a worker process has found."""
    for key, lines in found.items():
        for column, line in lines.items():
            if (changes := _here.get(key)) is not None:
                changes.add(column, line)


def rounded_words(name: str, dtype: npt.DTypeLike, value: str, advice: str) -> str:
    """Return the line about a column in which a whole number was rounded."""
    return (
        f"column {name!r}: {np.dtype(dtype)} rounds whole numbers above {exact_up_to(dtype):,}, "
        f"such as {value}: {advice}"
    )


def exact_up_to(dtype: npt.DTypeLike) -> int:
    """Return the largest number up to which a dtype of floats holds every whole number."""
    return 1 << int(np.finfo(dtype).nmant) + 1
