"""Lines of a text, byte ranges of a file, and rows of bytes to and from columns.

The C extension and its fallback in numpy and plain Python give the same results.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from flatout.kernels import absent
from flatout.kernels.checks import Numbers, Text, bytes_of_rows, check_range, text_of

try:
    from flatout.kernels import _lines as _c
except ImportError:
    _c = None  # type: ignore[assignment]

_use_c = _c is not None and absent.WANTED

Lines: TypeAlias = tuple[Numbers, Numbers]
# Byte offset in a row, bytes from there on, and a C-contiguous array with a row of that many bytes
# for each row.
Column: TypeAlias = tuple[int, int, npt.NDArray[Any]]

WHITE = b" \t\v\f\r"

_FIRST_ROOM = 1 << 12
_WINDOW = 1 << 16
# Kinds that the buffer protocol exports as plain numbers; all others go as bytes.
_NUMBERS = "biufc"


class FileTooShort(EOFError):
    """A file ends before the last byte of a row.

    Attributes:
        row: which of the rows that were asked for.
        at: the first byte of it that the file lacks.
    """

    def __init__(self, row: int, at: int, expected: tuple[int, int], size: int) -> None:
        super().__init__(
            f"row {row}: expected bytes {expected[0]} to {expected[1]} of the file, but byte {at} "
            f"is missing; the file now has {size} bytes"
        )
        self.row = row
        self.at = at


def available() -> bool:
    """Whether the C extension runs; otherwise its fallback does."""
    return _use_c


# ---- lines ----


def index_lines(
    buffer: Any,
    start: int = 0,
    stop: int | None = None,
    *,
    skip_blank: bool = True,
    comment: bytes | None = b"#",
    white: bytes = WHITE,
    threads: int = 1,
    least_per_thread: int = 1 << 20,
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
    index = _index if _use_c else _index_fallback
    absent.warn_without(_c)
    parts = max(1, min(threads, (stop - start) // least_per_thread))
    if parts == 1:
        return index(text, start, stop, skip_blank, comment, white)
    cuts = list(_cuts(text, start, stop, parts))
    with ThreadPoolExecutor(parts) as pool:
        result = list(
            pool.map(
                lambda first, last: index(text, first, last, skip_blank, comment, white),
                cuts[:-1],
                cuts[1:],
            )
        )
    return np.concatenate([part[0] for part in result]), np.concatenate(
        [part[1] for part in result]
    )


def _cuts(text: Text, start: int, stop: int, parts: int) -> Iterator[int]:
    cut = start
    yield cut
    for part in range(1, parts):
        cut = _next_line(text, max(cut, start + (stop - start) * part // parts), stop)
        yield cut
    yield stop


def _next_line(text: Text, at: int, stop: int) -> int:
    while at < stop:
        window = text[at : min(at + _WINDOW, stop)]
        first = int((window == ord("\n")).argmax())
        if window[first] == ord("\n"):
            return at + first + 1
        at += len(window)
    return stop


def _index(
    text: Text, start: int, stop: int, skip_blank: bool, comment: bytes | None, white: bytes
) -> Lines:
    starts, ends = np.empty(_FIRST_ROOM, np.int64), np.empty(_FIRST_ROOM, np.int64)
    count, at = 0, start
    while True:
        count, at = _c.index(text, at, stop, starts, ends, count, skip_blank, comment or b"", white)
        if at == stop:
            break
        # For lines of the length so far; a few short ones do not speak for all. Large memory grows
        # in its place.
        likely = int(1.02 * count * (stop - start) / (at - start))
        room = min(max(2 * count, likely), 4 * count)
        starts.resize(room, refcheck=False)
        ends.resize(room, refcheck=False)
    starts.resize(count, refcheck=False)
    ends.resize(count, refcheck=False)
    return starts, ends


def _index_fallback(
    text: Text, start: int, stop: int, skip_blank: bool, comment: bytes | None, white: bytes
) -> Lines:
    ends = np.flatnonzero(text[start:stop] == ord("\n")) + start
    starts = np.concatenate([[start], ends + 1])
    if starts[-1] < stop:
        ends = np.append(ends, stop)
    starts = starts[: len(ends)]
    has_return = (ends > starts) & (text[np.maximum(ends - 1, 0)] == ord("\r")) if stop else False
    ends = ends - has_return

    def is_wanted(line: bytes) -> bool:
        line = line.lstrip(white) if white else line
        if not line:
            return not skip_blank
        return comment is None or not line.startswith(comment)

    lines = zip(starts.tolist(), ends.tolist(), strict=True)
    wanted = np.array([is_wanted(text[a:b].tobytes()) for a, b in lines], bool)
    return starts[wanted], ends[wanted]


# ---- byte ranges of a file ----


def read_rows(fd: int, starts: Numbers, ends: Numbers, out: Text, out_starts: Numbers) -> None:
    """Read byte ranges of an open file into memory.

    Ranges that follow each other in the file, at less than 4 KiB, are read by one call of the
    system. The file's position stays where it is. After an error, `out` may be filled in part.
    """
    absent.warn_without(_c)
    read = _c.read if _use_c else _read_fallback
    short = read(fd, starts, ends, out, out_starts)
    if short is not None:
        row, at = short
        raise FileTooShort(row, at, (int(starts[row]), int(ends[row])), os.fstat(fd).st_size)


def _read_fallback(
    fd: int, starts: Numbers, ends: Numbers, out: Text, places: Numbers
) -> tuple[int, int] | None:
    for name, array in (("starts", starts), ("ends", ends), ("places", places)):
        _check_numbers(name, array, None if name == "starts" else len(starts))
    _check_memory("out", out, 1)
    _check_apart([out], [starts, ends, places])
    rows = list(zip(starts.tolist(), ends.tolist(), places.tolist(), strict=True))
    for row, (start, end, place) in enumerate(rows):
        if not (0 <= start <= end and place >= 0 and place + end - start <= len(out)):
            raise ValueError(f"row {row}: its bytes or its place in out are out of range")
    memory = out.data
    for row, (start, end, place) in enumerate(rows):
        at = start
        while at < end:
            got = os.preadv(fd, [memory[place + at - start : place + end - start]], at)
            if got == 0:
                return row, at
            at += got
    return None


# ---- rows to columns and back ----


def split_rows(source: Text, index: Numbers, columns: Sequence[Column]) -> None:
    """Copy bytes of rows into columns."""
    absent.warn_without(_c)
    pieces = [(offset, width, _plain(array)) for offset, width, array in columns]
    (_c.split if _use_c else _split_fallback)(source, index, pieces)


def join_rows(columns: Sequence[Column], out: Text, index: Numbers | None = None) -> None:
    """Copy columns into the bytes of rows: the inverse of `split_rows`."""
    absent.warn_without(_c)
    pieces = [(offset, width, _plain(array)) for offset, width, array in columns]
    rows = pieces[0][2].shape[0] if pieces and pieces[0][2].ndim else 0
    (_c.join if _use_c else _join_fallback)(pieces, rows, out, index)


def _split_fallback(source: Text, index: Numbers, columns: Sequence[Column]) -> None:
    _check_memory("source", source, 2)
    _check_numbers("index", index, None)
    _check_columns(columns, len(index), source.shape[1])
    _check_apart([array for _, _, array in columns], [source, index])
    check_range(index, len(source))
    for offset, width, array in columns:
        bytes_of_rows(array)[:] = source[index, offset : offset + width]


def _join_fallback(columns: Sequence[Column], rows: int, out: Text, index: Numbers | None) -> None:
    _check_memory("out", out, 2)
    _check_columns(columns, rows, out.shape[1])
    _check_apart([out], [array for _, _, array in columns])
    if index is None:
        if rows != len(out):
            raise ValueError(f"out: expected {rows} rows, found {len(out)}")
    else:
        _check_numbers("index", index, len(out))
        _check_apart([out], [index])
        check_range(index, rows)
    for offset, width, array in columns:
        rows_of_it = bytes_of_rows(array)
        out[:, offset : offset + width] = rows_of_it if index is None else rows_of_it[index]


def _check_columns(columns: Sequence[Column], rows: int, row_bytes: int) -> None:
    for number, (offset, width, array) in enumerate(columns):
        if not 0 <= offset <= offset + width <= row_bytes:
            raise ValueError(
                f"column {number}: {width} bytes at {offset} are not in a row of {row_bytes}"
            )
        size = len(array) if array.ndim and array.flags.c_contiguous else None
        if size != rows or array.nbytes != rows * width:
            raise ValueError(
                f"column {number}: expected {rows} C-contiguous rows of {width} bytes, found "
                f"{array.dtype} of shape {array.shape}"
            )


def _plain(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    if array.dtype.kind in _NUMBERS:
        return array
    if array.dtype.hasobject or not (array.ndim and array.flags.c_contiguous):
        raise ValueError(
            "column: expected a C-contiguous array of rows without Python objects, found "
            f"{array.dtype} of shape {array.shape}"
        )
    return bytes_of_rows(array)


def _check_apart(written: Sequence[npt.NDArray[Any]], read: Sequence[npt.NDArray[Any]]) -> None:
    if not all(array.flags.writeable for array in written):
        raise ValueError("expected C-contiguous memory that can be written")
    if any(np.may_share_memory(item, other) for item in written for other in read):
        raise ValueError("what is written shares memory with what is read")


def _check_memory(name: str, array: npt.NDArray[Any], dims: int) -> None:
    if array.dtype != np.uint8 or array.ndim != dims or not array.flags.c_contiguous:
        raise ValueError(
            f"{name}: expected C-contiguous uint8 in {dims} dimension(s), found {array.dtype} of "
            f"shape {array.shape}"
        )


def _check_numbers(name: str, array: npt.NDArray[Any], count: int | None) -> None:
    good = array.ndim == 1 and array.dtype == np.int64
    if not (good and array.flags.c_contiguous and array.flags.aligned):
        raise ValueError(
            f"{name}: expected a C-contiguous int64 array of one dimension, found {array.dtype} of "
            f"shape {array.shape}"
        )
    if count is not None and len(array) != count:
        raise ValueError(f"{name}: expected {count} numbers, found {len(array)}")
