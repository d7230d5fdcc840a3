"""Lines about values that reading has changed, such as whole numbers that a float dtype rounds."""

from __future__ import annotations

import itertools
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt

from flatout.data.reading.block import Numbers, Ragged, Values
from flatout.data.reading.decoder import Encoded
from flatout.data.reading.origins import Gather, alone

# Maximum number of rows of a block whose text is searched for a rounded whole number.
_SEARCHED_ROWS = 64
_WHOLE = re.compile(rb"[+-]?\d+(\.0*)?")

FieldsOf = Callable[[Numbers], Iterable[list[bytes]]]


def note_rounded_fields(
    changes: Changes,
    name: str,
    values: Values,
    rows: Encoded,
    fields_of: FieldsOf,
    advice: str = "an id has to be read as an id or as a class",
) -> None:
    """Note a column in which a whole number was rounded, if no fraction was rounded."""
    flat = values.values if isinstance(values, Ragged) else values.reshape(-1)
    if flat.dtype.kind != "f" or not flat.size or not changes.watches(name, ROUNDED):
        return
    most = exact_up_to(flat.dtype)
    if max(flat.max(), -flat.min()) < most:
        return
    size = np.abs(flat)
    places = np.flatnonzero((size >= most) & (size < np.inf))
    if isinstance(values, Ragged):
        near = np.unique(np.searchsorted(values.offsets, places, "right") - 1)
    else:
        near = np.unique(places // (flat.size // len(values)))
    for row, fields in zip(near.tolist(), fields_of(near), strict=False):
        for field in fields:
            number = _number(field)
            if not abs(number) >= most:
                continue
            rounded = float(flat.dtype.type(field))
            if not _WHOLE.fullmatch(field):
                if rounded != number:
                    changes.expect(name, ROUNDED)
                    return
            elif (whole := int(field.partition(b".")[0])) != rounded:
                where = rows.where(row, int(rows.starts[row]))
                line = rounded_words(name, flat.dtype, str(whole), advice)
                changes.add(name, f"{where}: {line}")
                return


def fields_by_row(rows: Encoded, split: Callable[[bytes], list[bytes]]) -> FieldsOf:
    """Return a function that splits the text of the first _SEARCHED_ROWS rows that it gets."""

    def fields_of(near: Numbers) -> Iterator[list[bytes]]:
        for row in near[:_SEARCHED_ROWS]:
            yield split(rows.buffer[rows.starts[row] : rows.ends[row]].tobytes())

    return fields_of


def _number(field: bytes) -> float:
    try:
        return float(field)
    except ValueError:  # the field of a bad row
        return math.nan


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
    for key, lines in found.items():
        for column, line in lines.items():
            if (changes := _here.get(key)) is not None:
                changes.add(column, line)


def rounded_words(name: str, dtype: npt.DTypeLike, value: str, advice: str) -> str:
    return (
        f"column {name!r}: {np.dtype(dtype)} rounds whole numbers above {exact_up_to(dtype):,}, "
        f"such as {value}: {advice}"
    )


def exact_up_to(dtype: npt.DTypeLike) -> int:
    """Return the largest number up to which a dtype of floats holds every whole number."""
    return 1 << int(np.finfo(dtype).nmant) + 1
