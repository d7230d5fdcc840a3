"""Detection of the dialect of CSV files: delimiter, decimal sign, header, encoding."""

from __future__ import annotations

import codecs
import csv
import io
import re
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress

from flatout.data.reading.files import File
from flatout.errors import as_data_error

# Delimiters, tried in this order. A tab, semicolon or bar that gives all rows the same number of
# fields is almost always the delimiter, but commas are frequent in numbers and texts, too.
_DELIMITERS = ("\t", ";", "|", ",")
# _BYTES: maximum number of bytes of a sample. _ROWS: maximum number of rows of a sample.
_BYTES, _ROWS = 1 << 16, 64
_NUMBER = r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?"
_WITH_COMMA = re.compile(r"[+-]?\d*,\d+([eE][+-]?\d+)?")
_WITH_POINT = re.compile(r"[+-]?\d*\.\d+([eE][+-]?\d+)?")
_DATE = re.compile(r"\d{1,4}[-./]\d{1,2}[-./]\d{1,4}([ T].*)?")
# Numbers that may be years in a header.
_YEARS = range(1900, 2101)
_MARKS = {
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}


def marked_encoding(file: File) -> str | None:
    """Return the encoding of a byte order mark, other than UTF-8; None without one."""
    begin = _begin(file, 4)
    return next((name for mark, name in _MARKS.items() if begin.startswith(mark)), None)


def sample_of(file: File) -> str:
    """Return the first lines of a file in UTF-8, with invalid bytes replaced."""
    content = _begin(file, _BYTES)
    if len(content) == _BYTES:
        content = content[: content.rfind(b"\n") + 1] or content
    return content.decode("utf-8-sig", "replace")


def _begin(file: File, size: int) -> bytes:
    with as_data_error("the file cannot be read", file.name), open(file.path, "rb") as opened:
        return opened.read(size)


def fields_of(text: str, delimiter: str, quote: str) -> list[list[str]]:
    lines = io.StringIO(text, newline="")
    if quote:
        reader = csv.reader(lines, delimiter=delimiter, quotechar=quote)
    else:
        reader = csv.reader(lines, delimiter=delimiter, quoting=csv.QUOTE_NONE)
    rows: list[list[str]] = []
    with suppress(csv.Error):  # the reader of the rows reports what is wrong with them
        for fields in reader:
            if fields:
                rows.append(fields)
            if len(rows) == _ROWS:
                break
    return rows


def sniff_delimiter(text: str, quote: str) -> str:
    """Return the delimiter for which the most rows have as many fields as the first row (>= 2)."""
    best, most = ",", 0.0
    for sign in _DELIMITERS:
        if sign == quote:
            continue
        widths = Counter(map(len, fields_of(text, sign, quote)))
        if not widths:
            continue
        first = len(fields_of(text, sign, quote)[0])
        share = widths[first] / widths.total()
        if first > 1 and share > most:
            best, most = sign, share
    return best


def sniff_decimal(rows: Sequence[Sequence[str]], delimiter: str) -> str:
    """Return a comma if numbers have commas and no number has a point; else a point."""
    if delimiter == ",":
        return "."
    fields = [field.strip() for row in rows for field in row]
    if any(map(_WITH_POINT.fullmatch, fields)):
        return "."
    return "," if any(map(_WITH_COMMA.fullmatch, fields)) else "."


def has_header(rows: Sequence[Sequence[str]], decimal: str, missing: Sequence[str]) -> bool:
    """Return whether the first row has names of columns: yes, unless it looks like the rows below.

    A text above a column of numbers is a name. So are numbers that count the columns, from 0 as
    pandas does, or by the year. Texts above texts are taken for names.
    """
    if len(rows) < 2:
        return True
    number = re.compile(_NUMBER.replace(r"\.", re.escape(decimal)))

    def is_number(field: str) -> bool:
        field = field.strip()
        return bool(number.fullmatch(field) or _DATE.fullmatch(field))

    above: list[str] = []
    for column, name in enumerate(rows[0]):
        below = [row[column] for row in rows[1:] if column < len(row)]
        fields = [field for field in below if field.strip() not in missing]
        if not fields or not all(map(is_number, fields)) or name.strip() in missing:
            continue
        if not is_number(name):
            return True
        above.append(name.strip())
    return not above or _counts_columns(above, len(rows[0]))


def _counts_columns(numbers: Sequence[str], columns: int) -> bool:
    if not all(number.isdecimal() for number in numbers):
        return False
    counts = [int(number) for number in numbers]
    in_turn = len(counts) > 1 and counts == list(range(counts[0], counts[0] + len(counts)))
    years = all(number in _YEARS for number in counts) and len(counts) < columns
    return in_turn and (years or (counts[0] == 0 and len(counts) > 2))
