"""Search in text formats for whole numbers that a float dtype rounds."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator

import numpy as np

from flatout.data.reading.block import Numbers, Ragged, Values
from flatout.data.reading.changed import ROUNDED, Changes, exact_up_to, rounded_words
from flatout.data.reading.decoder import Encoded

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
