"""A search for whole numbers of text formats that floats hold only rounded."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np

from flatout.data.block import Ragged, Values
from flatout.data.changed import ROUNDED, Changes, exact_up_to
from flatout.data.decoder import Encoded

# Rows of a block in whose text a rounded whole number is searched for.
_SEARCHED_ROWS = 64
_WHOLE = re.compile(rb"[+-]?\d+(\.0*)?")


def note_rounded_fields(
    changes: Changes,
    name: str,
    values: Values,
    rows: Encoded,
    fields_of: Callable[[bytes], list[bytes]],
) -> None:
    """Note a column in which a whole number was rounded, if no fraction was rounded."""
    flat = values.values if isinstance(values, Ragged) else values.reshape(-1)
    if flat.dtype.kind != "f" or not flat.size or not changes.watches(name, ROUNDED):
        return
    most = exact_up_to(flat.dtype)
    if max(flat.max(), -flat.min()) < most:
        return
    places = np.flatnonzero(np.abs(flat) >= most)
    if isinstance(values, Ragged):
        near = np.searchsorted(values.offsets, places, "right") - 1
    else:
        near = places // (flat.size // len(values))
    for row in np.unique(near)[:_SEARCHED_ROWS].tolist():
        for field in fields_of(rows.buffer[rows.starts[row] : rows.ends[row]].tobytes()):
            if not _WHOLE.fullmatch(field):
                if _is_large(field, most):
                    changes.expect(name, ROUNDED)
                    return
            elif int(field.partition(b".")[0]) != float(flat.dtype.type(field)):
                where = rows.where(row, int(rows.starts[row]))
                changes.add(
                    name,
                    f"{where}: {name}: {flat.dtype} rounds whole numbers above {most:,}, such as "
                    f"{field.decode()}; an id has to be read as an id or as a class",
                )
                return


def _is_large(field: bytes, most: int) -> bool:
    try:
        return abs(float(field)) >= most
    except ValueError:  # the field of a bad row
        return False
