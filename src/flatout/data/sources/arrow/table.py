"""Tables in memory: frames of pandas or polars, Arrow tables, dicts and lists of rows."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from flatout.data.digests.digests import digest_of
from flatout.data.pipeline import Pipeline
from flatout.data.reading.block import Block, Numbers
from flatout.data.reading.buffers import Buffers
from flatout.data.reading.changed import Changes
from flatout.data.reading.origins import Rows
from flatout.data.reading.schema import Given, Schema
from flatout.data.sources.optional import require
from flatout.errors import DataError
from flatout.words import counted

if TYPE_CHECKING:
    import pyarrow as pa

    from flatout.data.sources.arrow.arrow_schema import Categories, Dates, Defaults, Names

# Formats whose schemas also fit tables, and the options that have a meaning for tables.
_FORMATS = ("csv", "parquet", "arrow")
_OPTIONS = ("categories", "unknown", "dates", "stack", "left_out", "allow_nan", "defaults")


class TableRows(Rows):
    """Rows of an Arrow table in memory. Follows `flatout.data.reading.origins.Rows`.

    Args:
        digest_bytes: maximum number of bytes that the digest reads.
    """

    random = True

    def __init__(
        self,
        table: pa.Table,
        schema: Schema,
        notes: Sequence[str] = (),
        digest_bytes: int = 64 << 20,
    ) -> None:
        from flatout.data.sources.arrow.arrow_columns import note_rounding_of
        from flatout.data.sources.arrow.arrow_schema import check_schema, used_names

        if len(table) == 0:
            raise DataError("the table holds no rows")
        check_schema(schema, {field.name: field.type for field in table.schema}, "the table")
        self.schema = schema
        self.rows, self._digest_bytes = len(table), digest_bytes
        self._table = table.select(used_names(schema)).combine_chunks()
        changes = Changes()
        note_rounding_of(self._table, schema, changes, self.where)
        self._notes = [*changes.notes(), *notes]

    @cached_property
    def digest(self) -> str:
        """Digest over the schema, the number of rows and their values.

        Of a table above 64 MiB, only rows spread evenly over it are read, 64 MiB in all.
        """
        import pyarrow as pa

        some = self._table
        if some.nbytes > self._digest_bytes:
            count = max(1, self.rows * self._digest_bytes // some.nbytes)
            chosen = np.linspace(0, self.rows - 1, count).astype(np.int64)
            some = some.take(pa.array(chosen))
        return digest_of(self.schema.dumps(), str(self.rows), _values_digest(some))

    def content(self) -> str:
        return _values_digest(self._table)

    def take(self, numbers: Numbers, buffers: Buffers) -> Block:
        import pyarrow as pa

        from flatout.data.sources.arrow.arrow_columns import BadValue, to_columns

        try:
            columns = to_columns(self._table.take(pa.array(numbers)), self.schema, buffers)
        except BadValue as bad:
            raise DataError(bad.what, where=self.where(int(numbers[bad.row]))) from None
        return Block(columns, numbers)

    def where(self, number: int) -> str:
        return f"row {number:,} of the table"

    def describe(self) -> str:
        return f"table in memory, {counted(self.rows, 'row')}"

    def notes(self) -> list[str]:
        return self._notes


def table(
    rows: Any,
    *,
    target: Names = None,
    inputs: Names = None,
    weight: str | None = None,
    unused: Names = None,
    schema: Given | None = None,
    default: Defaults = None,
    categories: Categories = None,
    dates: Dates = None,
    stack: bool = False,
    skip_text: bool = False,
    allow_nan: bool | None = None,
) -> Pipeline:
    """Read rows of a table in memory.

    Args:
        rows: a frame of pandas or polars, an Arrow table, a dict of columns, or a list of dicts; a
            dict of single values is one row.
        schema: a schema as for `parquet`, or the schema of CSV, Parquet or Arrow files, so that
            inputs are the same as in training. A missing target or weight is then left out, since
            rows to predict have none.
        target: column of the target, or a list of columns, as for `parquet`. All other arguments
            are also as for `parquet`.

    Raises:
        DataError: `rows` is no table, or a column is missing or does not fit the schema. For a
            missing or unfit value, it names column and row.
    """
    require("pyarrow", "tables", "tables")
    from flatout.data.sources.arrow.arrow_schema import (
        ColumnOptions,
        check_options,
        given_schema,
        infer_schema,
    )
    from flatout.data.sources.arrow.vocabulary import (
        left_out_notes,
        merged,
        notes_of,
        texts_of,
        with_vocabularies,
    )

    data = _without_blanks(_without_views(_as_table(rows)))
    fields = {field.name: field.type for field in data.schema}
    wanted = ColumnOptions(
        target, inputs, weight, unused, default, categories, stack, dates, leave_out=skip_text
    )
    options = {} if allow_nan is None else {"allow_nan": allow_nan}
    if schema is not None:
        given = _without_absent(given_schema(schema, "table", wanted, options, _FORMATS), fields)
        check_options(given)
        return Pipeline(TableRows(data, given, left_out_notes(given, fields)))
    wanted = with_vocabularies(
        wanted, fields, lambda names, few: merged([texts_of(data[:1000] if few else data, names)])
    )
    inferred = infer_schema("table", fields, wanted, options)
    return Pipeline(TableRows(data, inferred, notes_of(inferred.options, wanted.numberish)))


def _without_absent(schema: Schema, fields: Mapping[str, Any]) -> Schema:
    options = {name: value for name, value in schema.options.items() if name in _OPTIONS}
    columns = tuple(
        column.model_copy(update={"role": "unused"})
        if column.role in ("target", "weight") and column.name not in fields
        else column
        for column in schema.columns
    )
    return Schema(format="table", columns=columns, options=options)


def _as_table(rows: Any) -> pa.Table:
    import pyarrow as pa

    try:
        if isinstance(rows, (pa.Table, pa.RecordBatch)):
            return pa.table(rows)
        if type(rows).__module__.partition(".")[0] == "pandas":
            return pa.Table.from_pandas(rows, preserve_index=False)
        if hasattr(rows, "__arrow_c_stream__"):
            return pa.table(rows)
        if isinstance(rows, Mapping):
            return pa.table({name: _column(values) for name, values in rows.items()})
        if isinstance(rows, Sequence) and rows and all(isinstance(r, Mapping) for r in rows):
            names = dict.fromkeys(name for row in rows for name in row)
            return pa.table({name: _column([row.get(name) for row in rows]) for name in names})
    except (pa.ArrowException, ValueError, TypeError, OverflowError) as error:
        raise DataError(f"these rows are no table: {error}") from error
    raise DataError(
        f"expected a table, found {type(rows).__name__}",
        do="take a frame of pandas or polars, an Arrow table, a dict of columns or a list of dicts",
    )


def _without_views(table: pa.Table) -> pa.Table:
    import pyarrow as pa

    for at, field in enumerate(table.schema):
        if pa.types.is_string_view(field.type):
            table = table.set_column(at, field.name, table[at].cast(pa.large_string()))
    return table


def _without_blanks(table: pa.Table) -> pa.Table:
    import pyarrow as pa
    import pyarrow.compute as pc

    for at, field in enumerate(table.schema):
        is_text = pa.types.is_string(field.type) or pa.types.is_large_string(field.type)
        if is_text and len(table) and not pc.any(pc.not_equal(table[at], "")).as_py():
            table = table.set_column(at, field.name, pa.nulls(len(table)))
    return table


def _values_digest(table: pa.Table) -> str:
    import pyarrow as pa

    digest = hashlib.blake2b(digest_size=8)
    for column in table.combine_chunks().columns:
        digest.update(column.is_null().combine_chunks().to_numpy(zero_copy_only=False).data)
        # The bytes of a missing value are arbitrary.
        there = pa.table([column.drop_null() if column.null_count else column], ["values"])
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, there.schema) as stream:
            stream.write_table(there)
        digest.update(sink.getvalue())
    return digest.hexdigest()


def _column(values: Any) -> pa.Array:
    import pyarrow as pa

    is_one = values is None or isinstance(values, (str, bytes)) or not hasattr(values, "__len__")
    values = [values] if is_one else values
    try:
        return pa.array(values)
    except (pa.ArrowException, TypeError):
        # Among numbers, an empty text is a missing value, as in CSV.
        return pa.array([None if isinstance(v, str) and not v else v for v in values])
