"""Dialect, names and types of the columns of CSV files, from the files' first lines."""

from __future__ import annotations

import codecs
import csv
import io
import re
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from flatout.data.reading.decoder import Bytes, Split
from flatout.data.reading.files import File
from flatout.data.sources.arrow.arrow_schema import ISO, ColumnOptions, is_date
from flatout.data.sources.csv.csv_text import Dialect, in_one_piece, not_utf8, read_text, split_rows
from flatout.errors import DataError, as_data_error

# Delimiters, tried in this order. A tab, semicolon or bar that gives all rows the same number of
# fields is almost always the delimiter, but commas are frequent in numbers and texts, too.
_DELIMITERS = ("\t", ";", "|", ",")
# _BYTES: maximum number of bytes of a sample. _ROWS: maximum number of rows of a sample.
_BYTES, _ROWS = 1 << 16, 64
_PLAIN_NUMBER = r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?"
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
    number = re.compile(_PLAIN_NUMBER.replace(r"\.", re.escape(decimal)))

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


# Start of the names given to columns without a name, as in pandas. BOM: byte order mark of UTF-8.
UNNAMED = "Unnamed: "
BOM = b"\xef\xbb\xbf"
# Maximum number of bytes of each file that are read to find names and types.
SAMPLE = 1 << 20
# Fraction of numbers among a column's texts from which on it holds numbers, and other texts are
# errors.
_MOSTLY = 0.9
_WHOLE = r"^\s*[+-]?\d{1,18}\s*$"
_NUMBER = r"^\s*[+-]?((\d+\.?\d*|\.\d+)([eE][+-]?\d+)?|[nN][aA][nN]|[iI]nf(inity)?)\s*$"
_POINT = r"\."
_DIGITS = r"^\s*[+-]?\d+\s*$"


class FileBegin(NamedTuple):
    """First bytes of a file, at most SAMPLE.

    Attributes:
        file: file that was read.
        text: first bytes of the file.
        rows: positions of the rows in the bytes; the first may be a header.
        first: bytes of the first row.
    """

    file: File
    text: Bytes
    rows: Split
    first: bytes


def begin_of(file: File, dialect: Dialect) -> FileBegin:
    with as_data_error("the file cannot be read", file.name), open(file.path, "rb") as opened:
        content = opened.read(SAMPLE)
    if not content.strip():
        raise DataError("the file is empty: expected rows", where=file.name)
    if b"\0" in content:
        raise DataError(
            "expected text in UTF-8, found bytes of 0",
            where=f"{file.name}: byte {content.index(0):,}",
            do="say how the file is written, for example encoding='utf-16-le'",
        )
    if b"\n" not in content and b"\r" in content:
        raise DataError(
            "expected lines that end in a newline, found carriage returns alone",
            where=file.name,
            do="convert its line ends, for example with: tr '\\r' '\\n'",
        )
    text = np.frombuffer(content, np.uint8)
    rows = split_rows(text, len(content) >= file.size, dialect)
    if not len(rows.starts):
        problem = rows.problem or f"the first row does not end within {SAMPLE:,} bytes"
        raise DataError(problem, where=f"{file.name}: byte 0")
    return FileBegin(file, text, rows, content[rows.starts[0] : rows.ends[0]])


def _fields(begin: FileBegin, dialect: Dialect) -> list[str]:
    try:
        words = begin.first.removeprefix(BOM).decode()
    except UnicodeDecodeError as error:
        byte, text = not_utf8(begin.first)
        byte += int(begin.rows.starts[0])
        line = begin.text[:byte].tobytes().count(b"\n") + 1
        raise DataError(
            text,
            where=f"{begin.file.name}:{line} (byte {byte:,})",
            do="say how the file is written: encoding='cp1252', or convert it to UTF-8",
        ) from error
    if not dialect.quote:
        return words.split(dialect.delimiter)
    reader = csv.reader(
        io.StringIO(words, newline=""), delimiter=dialect.delimiter, quotechar=dialect.quote
    )
    return next(reader)


def shared_names(
    begins: Sequence[FileBegin], dialect: Dialect, header: bool | Sequence[str]
) -> list[str]:
    """Return the names of the columns, which must be equal in all files."""
    names = _names(begins[0], dialect, header)
    for begin in begins[1:]:
        result = _names(begin, dialect, header)
        if result != names:
            raise DataError(
                f"expected the columns of {begins[0].file.name}: {', '.join(names)}; found "
                f"{', '.join(result)}",
                where=begin.file.name,
                do="read files with the same columns in the same order together",
            )
    return names


def _names(begin: FileBegin, dialect: Dialect, header: bool | Sequence[str]) -> list[str]:
    fields, where = _fields(begin, dialect), begin.file.name
    if header is True:
        names = [name.strip() or f"{UNNAMED}{at}" for at, name in enumerate(fields)]
    elif header is False:
        names = [f"f{at}" for at in range(len(fields))]
    else:
        names = list(header)
        if len(names) != len(fields):
            raise DataError(f"header names {len(names)} columns, found {len(fields)}", where=where)
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise DataError(
            f"several columns are called {', '.join(map(repr, twice))}",
            where=where,
            do="correct the header, or say header=False if there is none",
        )
    return names


def found_types(
    begins: Sequence[FileBegin], names: Sequence[str], dialect: Dialect, wanted: ColumnOptions
) -> dict[str, pa.DataType]:
    """Return the types of the columns, found in the first rows of some files.

    A column of whole numbers beyond int64 is read as text: floats would make different numbers
    equal.
    """
    dates = wanted.date_formats(names)
    texts = {
        *wanted.fixed_categories(names),
        *wanted.asked_categories(names),
        *(name for name, form in dates.items() if form != ISO),
    }
    types: dict[str, pa.DataType] = dict.fromkeys(names, pa.null())
    for begin in begins:
        text = in_one_piece(begin.text, begin.rows.starts, begin.rows.ends)
        as_bytes = dict.fromkeys(texts, pa.binary())
        table = read_text(text, names, dialect, as_bytes, skip_invalid=True)
        if len(table) == 0:
            raise DataError(
                f"expected rows of {len(names)} fields, found none in the first {SAMPLE:,} bytes",
                where=begin.file.name,
                do="correct the header, or name the columns: header=[...]",
            )
        kinds = {
            name: pa.string() if name in texts else _type_of(table[name], dialect.decimal)
            for name in names
        }
        floats = [name for name, kind in kinds.items() if kind == pa.float64()]
        if floats:
            as_texts = dict.fromkeys(names, pa.binary()) | dict.fromkeys(floats, pa.string())
            written = read_text(text, names, dialect, as_texts, skip_invalid=True)
            kinds |= {name: pa.string() for name in floats if _is_beyond_int64(written[name])}
        for name in names:
            types[name] = _common_type(types[name], kinds[name])
    return types


def _is_beyond_int64(column: pa.ChunkedArray) -> bool:
    """Return whether all texts are whole numbers and some of them exceed int64."""
    texts = column.drop_null()
    if not pc.all(pc.match_substring_regex(texts, _DIGITS)).as_py():
        return False
    longest = texts.filter(pc.greater_equal(pc.binary_length(texts), 19))
    return any(not -(2**63) <= int(text) < 2**63 for text in longest.to_pylist())


def _type_of(column: pa.ChunkedArray, decimal: str) -> pa.DataType:
    if pa.types.is_binary(column.type):  # the texts are not UTF-8
        return pa.string()
    if not pa.types.is_string(column.type):
        return column.type
    texts = column.drop_null()
    number = _NUMBER.replace(_POINT, re.escape(decimal))
    for pattern, type in ((_WHOLE, pa.int64()), (number, pa.float64())):
        share = pc.mean(pc.match_substring_regex(texts, pattern).cast(pa.float64())).as_py()
        if share is not None and share >= _MOSTLY:
            return type
    return column.type


def _common_type(a: pa.DataType, b: pa.DataType) -> pa.DataType:
    if a == b or pa.types.is_null(b):
        return a
    if pa.types.is_null(a):
        return b
    if {a, b} == {pa.int64(), pa.float64()}:
        return pa.float64()
    if pa.types.is_timestamp(a) or pa.types.is_timestamp(b):
        zones = {getattr(type, "tz", None) for type in (a, b)}
        if is_date(a) and is_date(b) and len(zones) == 1:
            return a if pa.types.is_timestamp(a) else b
    return pa.string()


def samples_of(begins: Sequence[FileBegin], header: bool) -> list[FileBegin]:
    """Return the first and the last sample that has rows, without headers."""
    samples = []
    for begin in begins:
        starts, ends = begin.rows.starts[header:], begin.rows.ends[header:]
        if len(starts):
            samples.append(begin._replace(rows=begin.rows._replace(starts=starts, ends=ends)))
    if not samples:
        names = ", ".join(begin.file.name for begin in begins[:3])
        raise DataError("the files hold no rows besides their header", where=names)
    return samples[:1] + samples[1:][-1:]
