"""Rows of CSV in bytes, and their conversion to Arrow tables."""

from __future__ import annotations

import csv as python_csv
import io
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from pyarrow import csv

from flatout.data.reading.block import Numbers
from flatout.data.reading.decoder import Bytes, Split
from flatout.errors import DataError
from flatout.kernels import lines

MISSING = ("", "NA", "N/A", "n/a", "#N/A", "<NA>", "NULL", "null", "None")

_NEWLINE, _RETURN = b"\n\r"


class Dialect(NamedTuple):
    """Characters and texts with a meaning in rows of CSV.

    Attributes:
        delimiter: character between fields.
        quote: character around fields that hold delimiters or newlines; doubled, it stands for
            itself. "" if quotes have no meaning.
        missing: texts that stand for a missing value.
        decimal: character before a number's fraction.
    """

    delimiter: str = ","
    quote: str = '"'
    missing: tuple[str, ...] = MISSING
    decimal: str = "."


def dialect_of(options: Mapping[str, Any]) -> Dialect:
    missing = options["missing"]
    if isinstance(missing, str) or not all(isinstance(text, str) for text in missing):
        raise DataError(f"missing: expected a list of texts, found {missing!r}")
    decimal = options.get("decimal", ".")
    dialect = Dialect(options["delimiter"], options["quote"], tuple(missing), decimal)
    for name, sign in zip(("delimiter", "quote", "", "decimal"), dialect, strict=True):
        if not name:
            continue
        if not (isinstance(sign, str) and sign.isascii() and sign not in ("\n", "\r")):
            raise DataError(f"{name}: expected an ASCII character, found {sign!r}")
        if len(sign) != 1 and (name, sign) != ("quote", ""):
            raise DataError(f"{name}: expected one character, found {sign!r}")
    for name, sign in (("decimal", decimal), ("quote", dialect.quote)):
        if sign == dialect.delimiter:
            raise DataError(f"delimiter and {name} are both {sign!r}: expected two signs")
    return dialect


def split_rows(buffer: Bytes, final: bool, dialect: Dialect, window: int = 1 << 22) -> Split:
    """Return the rows in a buffer without their line ends. Blank lines are left out."""
    quote = ord(dialect.quote) if dialect.quote else None
    windows = (buffer[at : at + window] for at in range(0, len(buffer), window))
    if quote is None or not any((part == quote).any() for part in windows):
        return _lines(buffer, final)
    splits = [Split(np.empty(0, np.int64), np.empty(0, np.int64), 0)]
    at, size, at_end = 0, window, False
    while not at_end:
        at_end = at + size >= len(buffer)
        rows = _quoted_rows(buffer[at : at + size], final and at_end, dialect)
        splits.append(rows._replace(starts=rows.starts + at, ends=rows.ends + at))
        at += rows.consumed
        # If a row does not fit into the window, the window is doubled.
        size = window if rows.consumed else 2 * size
    starts, ends = (np.concatenate([rows[i] for rows in splits]) for i in (0, 1))
    return Split(starts, ends, at, splits[-1].problem if final else "")


def _lines(text: Bytes, final: bool) -> Split:
    starts, ends = lines.index_lines(text, skip_blank=False, comment=None, white=b"")
    consumed = len(text)
    if not final and consumed and text[-1] != _NEWLINE:
        consumed = int(starts[-1])
        starts, ends = starts[:-1], ends[:-1]
    return Split(*_filled(text, starts, ends), consumed)


def _quoted_rows(text: Bytes, final: bool, dialect: Dialect) -> Split:
    newlines, is_open = _newlines_outside(text, dialect)
    starts = np.concatenate([[0], newlines + 1]).astype(np.int64)
    ends = np.append(newlines, len(text))
    consumed = len(text)
    if is_open or not final:  # bytes after the last newline are no whole row
        consumed = int(starts[-1])
        starts, ends = starts[:-1], ends[:-1]
    problem = "a quote is opened in this row, and never closed" if is_open else ""
    return Split(*_filled(text, starts, ends), consumed, problem)


def _filled(text: Bytes, starts: Numbers, ends: Numbers) -> tuple[Numbers, Numbers]:
    while True:
        has_return = (ends > starts) & (text[np.maximum(ends, 1) - 1] == _RETURN)
        if not has_return.any():
            filled = ends > starts
            return starts[filled], ends[filled]
        ends = ends - has_return


def _newlines_outside(text: Bytes, dialect: Dialect) -> tuple[Numbers, bool]:
    quotes = np.flatnonzero(text == ord(dialect.quote))
    opening, closing = quotes[::2], quotes[1::2]
    before = text[np.maximum(opening, 1) - 1]
    expected = (opening == 0) | np.isin(before, [ord(dialect.delimiter), _NEWLINE, _RETURN])
    # A doubled quote closes and opens again.
    expected[1:] |= opening[1:] - closing[: max(0, len(opening) - 1)] == 1
    if not expected.all():
        return _newlines_one_by_one(text, dialect)
    newlines = np.flatnonzero(text == _NEWLINE)
    in_quotes = np.searchsorted(quotes, newlines) % 2 == 1
    return newlines[~in_quotes], len(quotes) % 2 == 1


def _newlines_one_by_one(text: Bytes, dialect: Dialect) -> tuple[Numbers, bool]:
    quote, delimiter = re.escape(dialect.quote), re.escape(dialect.delimiter)
    quoted = rf"(?<![^{delimiter}\r\n]){quote}(?:[^{quote}]++|{quote}{quote})*+({quote}?)"
    newlines, is_open = [], False
    for match in re.finditer(f"{quoted}|\n".encode(), text.data):
        if text[match.start()] == _NEWLINE:
            newlines.append(match.start())
        else:
            is_open = not match[1]
    return np.array(newlines, np.int64), is_open


_LINE_ENDS = np.isin(np.arange(256), list(b"\n\r"))


def read_text(
    text: Any,
    names: Sequence[str],
    dialect: Dialect,
    types: Mapping[str, pa.DataType],
    used: Sequence[str] = (),
    *,
    skip_invalid: bool = False,
) -> pa.Table:
    """Parse whole rows, in this thread."""
    if skip_invalid and not is_readable(bytes(text)):
        # pyarrow fails when it skips a row that is not UTF-8.
        text = _without_torn(text, len(names), dialect)
    buffer = pa.py_buffer(text)
    quote: Any = dialect.quote or False
    return csv.read_csv(
        pa.BufferReader(buffer),
        # One block: otherwise pyarrow would search for the end of each block, and parse quotes
        # twice.
        read_options=csv.ReadOptions(
            use_threads=False, block_size=buffer.size + 1, column_names=list(names)
        ),
        parse_options=csv.ParseOptions(
            delimiter=dialect.delimiter,
            quote_char=quote,
            newlines_in_values=bool(dialect.quote),
            invalid_row_handler=(lambda row: "skip") if skip_invalid else None,
        ),
        convert_options=csv.ConvertOptions(
            column_types=dict(types),
            include_columns=list(used),
            null_values=list(dialect.missing),
            strings_can_be_null=True,
            decimal_point=dialect.decimal,
        ),
    )


def _without_torn(text: Any, fields: int, dialect: Dialect) -> bytes:
    """Drop each row that has a wrong number of fields and is not valid UTF-8."""
    buffer = np.frombuffer(text, np.uint8)
    split = split_rows(buffer, True, dialect)
    pairs = zip(split.starts.tolist(), split.ends.tolist(), strict=True)
    rows = [buffer[start:end].tobytes() for start, end in pairs]
    return b"\n".join(row for row in rows if is_readable(row) or _count(row, dialect) == fields)


def _count(row: bytes, dialect: Dialect) -> int:
    words = row.decode("latin-1")
    if not dialect.quote:
        return words.count(dialect.delimiter) + 1
    lines = io.StringIO(words, newline="")
    reader = python_csv.reader(lines, delimiter=dialect.delimiter, quotechar=dialect.quote)
    return len(next(reader, []))


def in_one_piece(buffer: Bytes, starts: Numbers, ends: Numbers) -> Any:
    """Return the bytes of rows, separated by newlines, without a copy where possible."""
    gaps = starts[1:] - ends[:-1]
    # A gap of one or two bytes is a line end, unless a file ended without a newline before a header
    # of one letter.
    if ((gaps == 1) | (gaps == 2)).all() and _LINE_ENDS[buffer[ends[:-1]]].all():
        return buffer[starts[0] : ends[-1]]
    view = buffer.data
    pairs = zip(starts.tolist(), ends.tolist(), strict=True)
    return b"\n".join([view[start:end] for start, end in pairs])


def not_utf8(text: bytes) -> tuple[int, str]:
    """Return the position of the first byte that is not UTF-8, and a line about it."""
    try:
        text.decode()
    except UnicodeDecodeError as error:
        at = error.start
    else:
        return 0, "expected UTF-8"
    near = text[max(0, at - 8) : at + 8]
    guess = next(name for name in ("cp1252", "latin-1") if is_readable(near, name))
    return at, (
        f"expected text in UTF-8, found the byte 0x{text[at]:02x} in {near!r} "
        f"(encoding={guess!r} reads it as {near.decode(guess)!r})"
    )


def is_readable(text: bytes, encoding: str = "utf-8") -> bool:
    try:
        text.decode(encoding)
    except UnicodeDecodeError:
        return False
    return True
