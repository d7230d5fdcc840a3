"""Search for CSV values that reading changes: codes that lose zeros, rounded whole numbers."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from flatout.data.reading.block import Numbers, offsets_of
from flatout.data.reading.changed import Changes
from flatout.data.reading.changed_fields import note_rounded_fields
from flatout.data.reading.decoder import Bytes, Encoded
from flatout.data.sources.csv.csv_split import Dialect
from flatout.data.sources.csv.csv_text import in_one_piece, read_text

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
