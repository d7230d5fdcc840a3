"""Conversion of whole CSV rows to Arrow tables."""

from __future__ import annotations

import csv as python_csv
import io
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import csv

from flatout.data.reading.block import Numbers
from flatout.data.reading.decoder import Bytes
from flatout.data.sources.csv.csv_split import Dialect, split_rows

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
    if skip_invalid and not _is_utf8(bytes(text)):
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
    return b"\n".join(row for row in rows if _is_utf8(row) or _count(row, dialect) == fields)


def _is_utf8(row: bytes) -> bool:
    try:
        row.decode()
    except UnicodeDecodeError:
        return False
    return True


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
    guess = next(name for name in ("cp1252", "latin-1") if _reads(near, name))
    return at, (
        f"expected text in UTF-8, found the byte 0x{text[at]:02x} in {near!r} "
        f"(encoding={guess!r} reads it as {near.decode(guess)!r})"
    )


def _reads(text: bytes, encoding: str) -> bool:
    try:
        text.decode(encoding)
    except UnicodeDecodeError:
        return False
    return True
