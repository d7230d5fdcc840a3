"""Rows of CSV in bytes: lines, except line ends in quotes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

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
