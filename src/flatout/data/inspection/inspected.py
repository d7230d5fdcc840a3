"""Report on the contents of files, as data and as text for the user."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from flatout.data.reading.schema import Schema
from flatout.errors import DataError, as_data_error
from flatout.words import counted, rounded, size_words

# Maximum number of classes that the headline names one by one.
_TOLD = 6


@dataclass(frozen=True)
class ColumnFacts:
    """Facts about one column.

    Attributes:
        name: name of the column.
        kind: dtype and shape, in words.
        role: role of the column in the schema.
        low: smallest value of the column; None without values.
        high: largest value of the column; None without values.
        lengths: percentiles of the rows' lengths, if rows are ragged.
    """

    name: str
    kind: str
    role: str
    low: float | None
    high: float | None
    lengths: dict[int, int] | None

    @property
    def range(self) -> str:
        if self.low is None or self.high is None:
            return ""
        return f"{_number(self.low)} … {_number(self.high)}"

    @property
    def spread(self) -> str:
        """Range and percentiles of lengths, such as "1 to 70 (50% ≤ 38, 90% ≤ 39, 99% ≤ 52)"."""
        if self.lengths is None:
            return ""
        low, *middle, high = self.lengths.items()
        inner = "".join(f"{share}% ≤ {length:,}, " for share, length in middle)
        return f"{low[1]:,} to {high[1]:,} ({inner[:-2]})"


@dataclass(frozen=True)
class Report:
    """Contents of files. `str` returns a text for the user.

    Attributes:
        format: name of the format, one of `formats.FORMATS`.
        files: number of files.
        bytes: size of the files as stored.
        packed: number of compressed files.
        unpacked_bytes: size of all files after decompression.
        rows: number of good rows.
        looked_at: number of good rows that were decoded for this report.
        columns: facts about each column.
        values_a_row: minimum and maximum number of index:value pairs of a LibSVM row; else None.
        max_id: the largest index of LibSVM, or id of an int64 column; None if the data have none.
        target: name of the target; None if there is no target, or several.
        classes: number of rows of each class, by name or number; None if the target is no
            class.
        target_mean: mean of the target, if it is a number and no class.
        bad_rows: number of rows that were left out.
        bad: description of the first bad row, with file and line.
        schema: schema that reads the files.
        notes: further lines for the user.
    """

    format: str
    files: int
    bytes: int
    packed: int
    unpacked_bytes: int
    rows: int
    looked_at: int
    columns: list[ColumnFacts]
    values_a_row: tuple[int, int] | None
    max_id: int | None
    target: str | None
    classes: dict[str, int] | None
    target_mean: float | None
    bad_rows: int
    bad: str
    schema: Schema | None
    notes: list[str]

    def as_dict(self) -> dict[str, Any]:
        """Return the report as plain data, with the schema as in TOML."""
        words = asdict(self)
        words["schema"] = None if self.schema is None else self.schema.model_dump(mode="json")
        return words

    def headline(self) -> str:
        """Return a line such as "19 files 18.4 GB 41.2M rows · clicks 3.1% · 39 fields"."""
        files = counted(self.files, "file")
        first = f"{files} {size_words(self.bytes)} {counted(self.rows, 'row')}"
        if self.packed:
            first += f" (unpacked {size_words(self.unpacked_bytes)})"
        parts = [first, self._classes(), self._fields()]
        if self.max_id is not None:
            parts.append(f"max id {self.max_id:,}")
        return " · ".join(part for part in parts if part)

    def _classes(self) -> str:
        if self.classes is None:
            mean = self.target_mean
            return "" if mean is None else f"{self.target} {rounded(mean, 4)} in the mean"
        total = sum(self.classes.values())
        if set(self.classes) == {"0", "1"}:
            return f"{self.target} {self.classes['1'] / total:.1%}"
        counts = sorted(self.classes.items(), key=lambda value: -value[1])
        if len(counts) > _TOLD:
            (most, many), (least, few) = counts[0], counts[-1]
            return (
                f"{len(counts):,} classes ({most} {many / total:.1%} … {least} {few / total:.2%})"
            )
        each = ", ".join(f"{name} {number / total:.1%}" for name, number in counts)
        return f"{len(counts)} class{'es' if len(counts) > 1 else ''} ({each})"

    def _fields(self) -> str:
        if self.values_a_row is not None:
            low, high = self.values_a_row
            return f"{low}" + (f" to {high}" if high > low else "") + " fields"
        inputs = [column for column in self.columns if column.role == "input"]
        return counted(len(inputs), "input column")

    def write_schema(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
        """Write the schema as a TOML file, for the user to read and edit.

        Args:
            path: path of the file.
            overwrite: replace a file with other contents, such as a schema that was edited.

        Raises:
            DataError: there is no schema, the file exists with other contents, or the file cannot
                be written.
        """
        if self.schema is None:
            raise DataError(f"files of {self.format} say themselves what they hold: no schema")
        with as_data_error("the schema cannot be written", os.fspath(path)):
            if not overwrite and os.path.exists(path) and not self._is_written(path):
                raise DataError(
                    "the file is there already, and holds something else than the schema found: "
                    "it is left as it is",
                    where=os.fspath(path),
                    do="write the schema to another file, or replace this one with --overwrite "
                    "(overwrite=True)",
                )
            self.schema.dump(path)

    def _is_written(self, path: str | os.PathLike[str]) -> bool:
        assert self.schema is not None
        return Path(path).read_bytes() == self.schema.dumps().encode()

    def bad_line(self) -> str:
        """Return the number of bad rows and the first of them, or "" where no row is bad."""
        if not self.bad_rows:
            return ""
        if not self.looked_at:
            return f"cannot be read: {self.bad}"
        return f"{counted(self.bad_rows, 'bad row')}: {self.bad}"

    def table(self) -> list[tuple[str, str, str, str, str]]:
        """Return name, kind, role, range and lengths of each column."""
        return [(c.name, c.kind, c.role, c.range, c.spread) for c in self.columns]

    def __str__(self) -> str:
        lines = [self.headline(), self.bad_line(), *self.notes]
        lines += ["  ".join(filter(None, row)) for row in self.table()]
        return "\n".join(line for line in lines if line)


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else rounded(value, 6)
