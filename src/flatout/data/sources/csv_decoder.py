"""Rows of CSV, parsed by pyarrow."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from flatout.data.block import Block, Numbers
from flatout.data.decoder import Bytes, Split, Survey, Where
from flatout.data.faults import Faults
from flatout.data.files import File
from flatout.data.indexed import IndexedRows
from flatout.data.running.buffers import Buffers
from flatout.data.schema import Given, Schema
from flatout.data.sources.arrow_columns import BadValue, to_columns
from flatout.data.sources.arrow_schema import (
    Wanted,
    check_options,
    check_schema,
    given_schema,
    infer_schema,
    source_names,
    used_names,
)
from flatout.data.sources.csv_begin import (
    BOM,
    UNNAMED,
    begin_of,
    found_types,
    samples_of,
    shared_names,
)
from flatout.data.sources.csv_split import MISSING, dialect_of, split_rows
from flatout.data.sources.csv_text import in_one_piece, read_text
from flatout.errors import DataError

_OPTIONS = ("delimiter", "quote", "header", "missing", "bools")


class CsvDecoder:
    """Rows of CSV. Follows `flatout.data.decoder.Decoder`.

    Args:
        schema: options delimiter, quote, missing, allow_nan, stack, bools (stacked columns of true
            and false) and categories say the rest.
        names: of the columns in the files.
        headers: the lines that may stand first in a file and are no rows.
    """

    needs_survey = False

    def __init__(self, schema: Schema, names: Sequence[str], headers: frozenset[bytes]) -> None:
        self.schema = schema
        self.names = list(names)
        self.dialect = dialect_of(schema.options)
        self._headers = headers
        self._used = used_names(schema)
        self._types = _types_to_read(schema)
        types = {name: self._types.get(name, pa.null()) for name in names}
        check_schema(schema, types, "the schema")

    def split(self, buffer: Bytes, final: bool) -> Split:
        """Lines, unless their end is in quotes."""
        split = split_rows(buffer, final, self.dialect)
        starts, ends = split.starts, split.ends
        if len(starts):
            first = buffer[starts[0] : ends[0]].tobytes()
            if first in self._headers:
                starts, ends = starts[1:], ends[1:]
            elif first.startswith(BOM):
                starts[0] += len(BOM)
        return split._replace(starts=starts, ends=ends)

    def survey(
        self, buffer: Bytes, starts: Numbers, ends: Numbers, faults: Faults, where: Where
    ) -> Survey:
        """Which rows are good."""
        numbers = np.arange(len(starts), dtype=np.int64)
        block = self.decode(buffer, starts, ends, numbers, None, Buffers(), faults, where)
        good = np.zeros(len(starts), bool)
        good[block.numbers] = True
        return Survey(good, {}, {})

    def decode(
        self,
        buffer: Bytes,
        starts: Numbers,
        ends: Numbers,
        numbers: Numbers,
        lengths: Mapping[str, Numbers] | None,
        buffers: Buffers,
        faults: Faults,
        where: Where,
    ) -> Block:
        """Decode rows into arrays from `buffers`."""
        rows = np.arange(len(starts))
        while True:
            try:
                table = self._parse(buffer, starts[rows], ends[rows])
                columns = to_columns(table, self.schema, buffers)
                return Block(columns, numbers[rows])
            except BadValue as bad:
                row = int(rows[bad.row])
                faults.bad(bad.what, where(row, int(starts[row])))
                rows = np.delete(rows, bad.row)

    def _parse(self, buffer: Bytes, starts: Numbers, ends: Numbers) -> pa.Table:
        """The fields of rows that are used."""
        if len(starts) == 0:
            return pa.schema(self._types).empty_table()
        text = in_one_piece(buffer, starts, ends)
        try:
            table = read_text(text, self.names, self.dialect, self._types, self._used)
        except pa.ArrowInvalid as error:
            raise BadValue(*self._explain(str(error), len(starts))) from error
        if len(table) != len(starts):
            raise BadValue(
                self._first_torn(buffer, starts, ends),
                "expected one row, found more or none (a carriage return ends a row as well)",
            )
        return table

    def _explain(self, words: str, rows: int) -> tuple[int, str]:
        """Row and what is wrong, of pyarrow's message."""
        found = re.search(r"Row #(\d+): ", words)
        if found is None:
            raise DataError(f"these {rows:,} rows cannot be parsed: {words}")
        row = int(found[1]) - 1
        if counts := re.search(r"Expected (\d+) columns, got (\d+)", words):
            return row, f"expected {counts[1]} fields, found {counts[2]}"
        column = re.search(r"In CSV column #(\d+)", words)
        value = re.search(r"invalid value '(.*)'$", words, re.DOTALL)
        if column is None:
            return row, f"expected a row of CSV, found: {words}"
        name = self.names[int(column[1])]
        told = repr(value[1]) if value else words.rpartition(": ")[2]
        type = self._types[name]
        expected = "text" if type == pa.string() else np.dtype(type.to_pandas_dtype()).name
        return row, f"column {name!r}: expected {expected}, found {told}"

    def _first_torn(self, buffer: Bytes, starts: Numbers, ends: Numbers) -> int:
        """The first row that is not one row to pyarrow, by halving."""
        low, high = 0, len(starts)
        while high - low > 1:
            middle = (low + high) // 2
            text = in_one_piece(buffer, starts[low:middle], ends[low:middle])
            table = read_text(text, self.names, self.dialect, self._types, self._used)
            low, high = (middle, high) if len(table) == middle - low else (low, middle)
        return low


def _types_to_read(schema: Schema) -> dict[str, pa.DataType]:
    """In which types pyarrow is to read the columns that are used."""
    types = {}
    for column in schema.columns:
        if column.role == "unused":
            continue
        for name in source_names(schema, column):
            if name in schema.options.get("categories", {}):
                types[name] = pa.string()
            elif name in schema.options.get("bools", ()):
                types[name] = pa.bool_()
            elif column.dtype == "float16":
                types[name] = pa.float32()
            else:
                types[name] = pa.from_numpy_dtype(column.numpy_dtype)
    return types


def csv_rows(
    files: Sequence[File],
    wanted: Wanted,
    faults: Faults,
    schema: Given | None = None,
    **given: Any,
) -> IndexedRows:
    """The rows of CSV files; arguments as those of `csv`, of which `given` may be None."""
    options = {name: value for name, value in given.items() if value is not None}
    if schema is not None:
        base = given_schema(schema, "csv", wanted, options)
        options = base.options
    is_tsv = all({".tsv", ".tab"} & set(Path(file.name).suffixes) for file in files)
    defaults = {"delimiter": "\t" if is_tsv else ",", "quote": '"', "header": True}
    options = {**defaults, "missing": list(MISSING), **options}
    dialect, header = dialect_of(options), options["header"]
    begins = [begin_of(file, dialect) for file in files]
    names = shared_names(begins, dialect, header)
    headers = frozenset(begin.first for begin in begins) if header is True else frozenset()
    if schema is None:
        types = found_types(samples_of(begins, header is True), names, dialect, wanted)
        nameless = [name for name in names if name.startswith(UNNAMED)]
        base = infer_schema("csv", types, wanted.without(nameless), options)
        # A stacked column is float32 in the schema, but true and false are read as such.
        bools = [name for name in base.options.get("stack", ()) if types[name] == pa.bool_()]
        if bools:
            base = base.model_copy(update={"options": {**base.options, "bools": bools}})
    else:
        base = base.model_copy(update={"options": options})
    check_options(base, _OPTIONS)
    return IndexedRows(files, CsvDecoder(base, names, headers), faults, "CSV")
