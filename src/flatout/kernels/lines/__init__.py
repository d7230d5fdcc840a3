"""Lines of a text, byte ranges of a file, and rows of bytes to and from columns."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from flatout.kernels import missing_extension
from flatout.kernels.checks import Numbers, Text, bytes_of_rows, text_of

_c = missing_extension.required("_lines")


Lines: TypeAlias = tuple[Numbers, Numbers]
# Byte offset in a row, number of bytes from there, and a C-contiguous array with a row of that many
# bytes for each row.
Column: TypeAlias = tuple[int, int, npt.NDArray[Any]]

WHITE = b" \t\v\f\r"

_FIRST_ROOM = 1 << 12
# Kinds that the buffer protocol exports as plain numbers. All others are passed as bytes.
_NUMBERS = "biufc"


class FileTooShort(EOFError):
    """Raised if a file ends before the last byte of a row.

    Attributes:
        row: index of the requested row.
        at: the first byte of it that is missing in the file.
    """

    def __init__(self, row: int, at: int, expected: tuple[int, int], size: int) -> None:
        super().__init__(
            f"row {row}: expected bytes {expected[0]} to {expected[1]} of the file, but byte {at} "
            f"is missing; the file now has {size} bytes"
        )
        self.row = row
        self.at = at


# ---- lines ----


def index_lines(
    buffer: Any,
    start: int = 0,
    stop: int | None = None,
    *,
    skip_blank: bool = True,
    comment: bytes | None = b"#",
    white: bytes = WHITE,
) -> Lines:
    r"""Find the lines of `buffer[start:stop]`.

    A line ends before its "\n" and before a "\r" that stands there; the last may lack its newline.
    """
    text = text_of("buffer", buffer)
    stop = len(text) if stop is None else stop
    if not 0 <= start <= stop <= len(text):
        raise ValueError(
            f"expected 0 <= start <= stop <= {len(text)}, found start {start}, stop {stop}"
        )
    if comment is not None and (not comment or b"\n" in comment):
        raise ValueError(f"comment: expected bytes of one line, or None; found {comment!r}")
    starts, ends = np.empty(_FIRST_ROOM, np.int64), np.empty(_FIRST_ROOM, np.int64)
    count, at = 0, start
    while True:
        count, at = _c.index(text, at, stop, starts, ends, count, skip_blank, comment or b"", white)
        if at == stop:
            break
        # An estimate from the lines so far, limited because a few short lines may not be typical.
        # Large memory grows in place.
        likely = int(1.02 * count * (stop - start) / (at - start))
        room = min(max(2 * count, likely), 4 * count)
        starts.resize(room, refcheck=False)
        ends.resize(room, refcheck=False)
    starts.resize(count, refcheck=False)
    ends.resize(count, refcheck=False)
    return starts, ends


# ---- byte ranges of a file ----


def read_rows(fd: int, starts: Numbers, ends: Numbers, out: Text, out_starts: Numbers) -> None:
    """Read byte ranges of an open file into memory.

    Ranges that follow each other in the file, with gaps below 4 KiB, are read by one system call.
    The file's position does not change. After an error, `out` may be filled in part.
    """
    short = _c.read(fd, starts, ends, out, out_starts)
    if short is not None:
        row, at = short
        raise FileTooShort(row, at, (int(starts[row]), int(ends[row])), os.fstat(fd).st_size)


# ---- rows to columns and back ----


def split_rows(source: Text, index: Numbers, columns: Sequence[Column]) -> None:
    pieces = [(offset, width, _plain(array)) for offset, width, array in columns]
    _c.split(source, index, pieces)


def join_rows(columns: Sequence[Column], out: Text, index: Numbers | None = None) -> None:
    pieces = [(offset, width, _plain(array)) for offset, width, array in columns]
    rows = pieces[0][2].shape[0] if pieces and pieces[0][2].ndim else 0
    _c.join(pieces, rows, out, index)


def _plain(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    if array.dtype.kind in _NUMBERS:
        return array
    if array.dtype.hasobject or not (array.ndim and array.flags.c_contiguous):
        raise ValueError(
            "column: expected a C-contiguous array of rows without Python objects, found "
            f"{array.dtype} of shape {array.shape}"
        )
    return bytes_of_rows(array)
