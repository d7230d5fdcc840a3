"""Rows of CSV, parsed by pyarrow, and lines about the values that parsing changes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from flatout.data.reading.block import Block, Numbers, offsets_of
from flatout.data.reading.buffers import Buffers
from flatout.data.reading.changed import Changes, note_rounded_fields
from flatout.data.reading.decoder import Bytes, Encoded, Lengths, Split, Survey, good_rows
from flatout.data.reading.error_policy import ErrorPolicy
from flatout.data.reading.schema import Schema
from flatout.data.sources.arrow.arrow_columns import BadValue, to_columns
from flatout.data.sources.arrow.arrow_schema import (
    ISO_TYPES,
    check_schema,
    is_date,
    source_names,
    used_names,
)
from flatout.data.sources.csv.csv_begin import BOM
from flatout.data.sources.csv.csv_text import (
    Dialect,
    dialect_of,
    in_one_piece,
    not_utf8,
    read_text,
    split_rows,
)
from flatout.errors import DataError

# Name of a change: a code has lost its leading zeros.
_ZEROS = "leading zeros"
_CODE = re.compile(r"0\d+")
# Byte codes. A byte that may stand before a field is below `-`; a digit is above `/`.
_MINUS, _SLASH = b"-/"


class CsvChanges:
    """Finds the first value of each column that decoding changes."""

    def __init__(
        self, changes: Changes, names: Sequence[str], numeric: Sequence[str], dialect: Dialect
    ) -> None:
        self.changes = changes
        self._names, self._numeric, self._dialect = list(names), list(numeric), dialect

    def look_for_zeros(self, rows: Encoded, text: Any) -> None:
        """Note each column in which a code, such as 02116, loses its leading zeros."""
        watched = [name for name in self._numeric if self.changes.watches(name, _ZEROS)]
        content = np.frombuffer(text, np.uint8)
        delimiter = ord(self._dialect.delimiter)
        if not watched or not len(zeros := _zeros_before_digits(content, delimiter)):
            return
        sizes = rows.ends - rows.starts
        gathered = isinstance(text, bytes)
        starts = offsets_of(sizes + 1)[:-1] if gathered else rows.starts - rows.starts[0]
        row = np.searchsorted(starts, zeros, side="right") - 1
        delimiters = self._delimiters(content, delimiter)
        column = np.searchsorted(delimiters, zeros) - np.searchsorted(delimiters, starts[row])
        for at, first in zip(*np.unique(column, return_index=True), strict=True):
            if at < len(self._names) and (name := self._names[at]) in watched:
                place, own = int(zeros[first]), int(row[first])
                rest = content[place : starts[own] + sizes[own]].tobytes()
                self._look_at(name, rest, rows.where(own, int(rows.starts[own])))

    def _delimiters(self, content: Bytes, delimiter: int) -> Numbers:
        found = content == delimiter
        if self._dialect.quote and (quotes := content == ord(self._dialect.quote)).any():
            found &= np.cumsum(quotes, dtype=np.uint8) % 2 == 0
        return np.flatnonzero(found)

    def _look_at(self, name: str, rest: bytes, where: str) -> None:
        field = rest.split(self._dialect.delimiter.encode(), 1)[0].decode("latin-1")
        field = field.strip(" \t" + self._dialect.quote)
        if field in self._dialect.missing:
            return
        if _CODE.fullmatch(field):
            self.changes.add(
                name,
                f"{where}: column {name!r}: {field} is read as the number {int(field)}, without "
                f"its leading zeros: to read texts, pass categories=[{name!r}]",
            )
        else:
            self.changes.expect(name, _ZEROS)

    def look_for_rounding(self, rows: Encoded, name: str, values: npt.NDArray[Any]) -> None:
        """Note a column in which a whole number was rounded, if no fraction was rounded."""

        def fields_of(near: Numbers) -> Iterator[list[bytes]]:
            text = in_one_piece(rows.buffer, rows.starts[near], rows.ends[near])
            types = {name: pa.string()}
            for field in read_text(text, self._names, self._dialect, types, [name])[name]:
                # A missing field has no text: its value is the default.
                number = (field.as_py() or "").strip().replace(self._dialect.decimal, ".")
                yield [number.encode()]

        advice = f"for ids pass categories=[{name!r}]"
        note_rounded_fields(self.changes, name, values, rows, fields_of, advice)


def _zeros_before_digits(content: Bytes, delimiter: int) -> Numbers:
    """Return positions of zeros that start a longer field, and a few places that start no field."""
    found = content[:-1] == ord("0")
    found &= content[1:] > _SLASH
    before = content[:-2] < _MINUS
    if delimiter >= _MINUS:
        before |= content[:-2] == delimiter
    found[1:] &= before
    return np.flatnonzero(found) if found.any() else np.empty(0, np.int64)


# Maximum number of bad rows that `look` leaves out. Each one takes another parse.
_MOST_BAD = 10


class CsvDecoder:
    """Rows of CSV. Follows `flatout.data.reading.decoder.Decoder`."""

    needs_survey = False

    def __init__(
        self,
        schema: Schema,
        names: Sequence[str],
        headers: frozenset[bytes],
        notes: Sequence[str] = (),
        changes: Changes | None = None,
    ) -> None:
        self._notes = list(notes)
        self.changes = Changes() if changes is None else changes
        self.schema = schema
        self.names = list(names)
        self.dialect = dialect_of(schema.options)
        self._headers = headers
        self._used = used_names(schema)
        self._types = _types_to_read(schema)
        types = {name: self._types.get(name, pa.null()) for name in names}
        check_schema(schema, types, "the schema")
        numeric = [name for name, type in self._types.items() if _is_number(type)]
        self._look = CsvChanges(self.changes, names, numeric, self.dialect)

    @property
    def notes(self) -> list[str]:
        """Lines about the dialect of the files, and about changed values."""
        return [*self.changes.notes(), *self._notes]

    def split(self, buffer: Bytes, final: bool) -> Split:
        """Find lines, except line ends in quotes, without the header at the start of a file."""
        split = split_rows(buffer, final, self.dialect)
        starts, ends = split.starts, split.ends
        if len(starts):
            first = buffer[starts[0] : ends[0]].tobytes()
            if first in self._headers:
                starts, ends = starts[1:], ends[1:]
            elif first.startswith(BOM):
                starts[0] += len(BOM)
        return split._replace(starts=starts, ends=ends)

    def split_rest(self, buffer: Bytes, final: bool) -> Split:
        """Find lines after the start of a file, where a line equal to the header is a row."""
        return split_rows(buffer, final, self.dialect)

    def survey(self, rows: Encoded, policy: ErrorPolicy) -> Survey:
        return good_rows(self, rows, policy)

    def decode(
        self, rows: Encoded, lengths: Lengths, buffers: Buffers, policy: ErrorPolicy
    ) -> Block:
        good = np.arange(len(rows.starts))
        while True:
            try:
                read = rows if len(good) == len(rows.starts) else _some(rows, good)
                table = self._parse(read)

                def large(name: str, values: Any, out: Any, row_of: Any, read: Any = read) -> None:
                    self._look.look_for_rounding(read, name, out)

                columns = to_columns(table, self.schema, buffers, large)
                return Block(columns, read.numbers)
            except BadValue as bad:
                row = int(good[bad.row])
                where = rows.where(row, int(rows.starts[row]) + bad.byte)
                policy.bad(bad.what, where, bad.do)
                good = np.delete(good, bad.row)

    def look(self, rows: Encoded) -> None:
        """Decode rows, some of which may be bad, and note the values that decoding changes."""
        with suppress(DataError):
            self.decode(rows, None, Buffers(), ErrorPolicy("skip", max_errors=_MOST_BAD))

    def _parse(self, rows: Encoded) -> pa.Table:
        buffer, starts, ends = rows.buffer, rows.starts, rows.ends
        if len(starts) == 0:
            return pa.schema(self._types).empty_table()
        text = in_one_piece(buffer, starts, ends)
        try:
            table = read_text(text, self.names, self.dialect, self._types, self._used)
        except pa.ArrowInvalid as error:
            row, what, do = self._explain(str(error), len(starts))
            if "invalid UTF8" in what:
                byte, result = not_utf8(buffer[starts[row] : ends[row]].tobytes())
                raise BadValue(row, f"{what.partition(':')[0]}: {result}", byte) from error
            raise BadValue(row, what, do=do) from error
        if len(table) != len(starts):
            raise BadValue(
                self._first_torn(buffer, starts, ends),
                "expected one row, found more or none (a carriage return ends a row as well)",
            )
        self._look.look_for_zeros(rows, text)
        return table

    def _explain(self, words: str, rows: int) -> tuple[int, str, str]:
        """Return the row, the fault and the advice for a message of pyarrow."""
        match = re.search(r"Row #(\d+): ", words)
        if match is None:
            raise DataError(f"these {rows:,} rows cannot be parsed: {words}")
        row = int(match[1]) - 1
        if counts := re.search(r"Expected (\d+) columns, got (\d+)", words):
            return row, f"expected {counts[1]} fields, found {counts[2]}", "fix it"
        column = re.search(r"In CSV column #(\d+)", words)
        value = re.search(r"invalid value '(.*)'$", words, re.DOTALL)
        if column is None:
            return row, f"expected a row of CSV, found: {words}", "fix it"
        name = self.names[int(column[1])]
        value_words = repr(value[1]) if value else words.rpartition(": ")[2]
        type = self._types[name]
        if is_date(type):
            expected = f"a date as {self.schema.options['dates'][name]!r}"
        else:
            expected = "text" if type == pa.string() else np.dtype(type.to_pandas_dtype()).name
        if value and not re.search(r"\d", value[1]):
            value_words += f" (missing=[{value_words}, ...] takes it for a missing value)"
        do = "fix it"
        if value and pa.types.is_integer(type):
            do = _advice_for_whole_numbers(name, value[1], self.dialect.decimal)
        return row, f"column {name!r}: expected {expected}, found {value_words}", do

    def _first_torn(self, buffer: Bytes, starts: Numbers, ends: Numbers) -> int:
        low, high = 0, len(starts)
        while high - low > 1:
            middle = (low + high) // 2
            text = in_one_piece(buffer, starts[low:middle], ends[low:middle])
            table = read_text(text, self.names, self.dialect, self._types, self._used)
            low, high = (middle, high) if len(table) == middle - low else (low, middle)
        return low


def _advice_for_whole_numbers(name: str, text: str, decimal: str) -> str:
    try:
        number = float(text.replace(decimal, "."))
    except ValueError:
        return "fix it"
    if number.is_integer() and abs(number) >= 2**63:
        return f"pass categories=[{name!r}], which gives each text a number of its own"
    return f"set the column's type: schema=data.schema.with_dtypes({{{name!r}: 'float32'}})"


def _is_number(type: pa.DataType) -> bool:
    return bool(pa.types.is_integer(type) or pa.types.is_floating(type))


def _some(rows: Encoded, wanted: Numbers) -> Encoded:
    """Return the wanted rows, whose `where` takes a row's number among them."""
    return rows._replace(
        starts=rows.starts[wanted],
        ends=rows.ends[wanted],
        numbers=rows.numbers[wanted],
        where=lambda row, byte: rows.where(int(wanted[row]), byte),
    )


def _types_to_read(schema: Schema) -> dict[str, pa.DataType]:
    types = {}
    for column in schema.columns:
        if column.role == "unused":
            continue
        for name in source_names(schema, column):
            if name in schema.options.get("categories", {}):
                types[name] = pa.string()
            elif name in schema.options.get("bools", ()):
                types[name] = pa.bool_()
            elif name in schema.options.get("dates", {}):
                types[name] = ISO_TYPES.get(schema.options["dates"][name], pa.string())
            elif column.dtype == "float16":
                types[name] = pa.float32()
            else:
                types[name] = pa.from_numpy_dtype(column.numpy_dtype)
    return types
