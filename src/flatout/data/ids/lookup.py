"""Sources whose ids are replaced by rows of a table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import numpy as np

from flatout.data.digests.digests import digest_of
from flatout.data.reading.block import Block, Numbers, Ragged, Values
from flatout.data.reading.buffers import Buffers
from flatout.data.reading.origins import Chunks, Rows, Stream, is_chunks, is_rows
from flatout.data.reading.schema import Schema
from flatout.errors import DataError


class Lookup(Protocol):
    """Returns the row of each id. `IdMap` implements it."""

    @property
    def column(self) -> str: ...

    @property
    def digest(self) -> str:
        """16 hex digits that differ for other rows."""
        ...

    def rows_of(self, ids: Numbers, out: Numbers) -> int:
        """Write the rows of ids to `out`; return the position of the first unknown id, or -1."""
        ...


class _Lookup:
    """Members that are common to rows, chunks and streams; all others are those of `inner`."""

    schema: Schema

    def __init__(self, inner: Any, maps: Mapping[str, Lookup]) -> None:
        self.inner = inner
        self.maps = dict(maps)
        self.schema = inner.schema
        for name in maps:
            _check_column(inner, name)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name in ("inner", "maps"):
            raise AttributeError(name)
        return getattr(self.inner, name)

    @property
    def digest(self) -> str:
        return digest_of(self.inner.digest, *(value.digest for value in self.maps.values()))

    def _looked_up(self, block: Block, buffers: Buffers) -> Block:
        columns = dict(block.columns)
        for name, value in self.maps.items():
            columns[name] = self._rows(value, columns[name], block.numbers, buffers)
        return Block(columns, block.numbers)

    def _rows(self, lookup: Lookup, values: Values, numbers: Numbers, buffers: Buffers) -> Values:
        ids = np.ascontiguousarray(values.values if isinstance(values, Ragged) else values)
        rows = buffers.empty(ids.shape, np.int64)
        bad = lookup.rows_of(ids, rows)
        if bad >= 0:
            raise self._no_row(lookup.column, int(ids.reshape(-1)[bad]), bad, values, numbers)
        return Ragged(rows, values.offsets) if isinstance(values, Ragged) else rows

    def _no_row(self, column: str, id: int, at: int, values: Values, numbers: Numbers) -> DataError:
        if isinstance(values, Ragged):
            row = int(np.searchsorted(values.offsets, at, side="right")) - 1
            place = at - int(values.offsets[row])
        else:
            row, place = divmod(at, max(1, values[0].size))
        number = int(numbers[row])
        known = getattr(self.inner, "where", None)
        where = f"row {number:,}" if known is None else known(number)
        return DataError(
            f"id {id} in column {column!r}, place {place}, has no row of the table: it was not in "
            "the training data, and the schema lets it share none",
            where=where,
            do=f"buckets = 1 in the ids of column {column!r} gives unknown ids one row, more "
            "hashes them to so many",
        )


class RowsLookup(_Lookup):
    """Rows by index. Follows `flatout.data.reading.origins.Rows`."""

    def take(self, numbers: Numbers, buffers: Buffers) -> Block:
        return self._looked_up(self.inner.take(numbers, buffers), buffers)


class ChunksLookup(_Lookup):
    """Rows in chunks. Follows `flatout.data.reading.origins.Chunks`."""

    def read(self, chunk: int, buffers: Buffers) -> Block:
        return self._looked_up(self.inner.read(chunk, buffers), buffers)


class StreamLookup(_Lookup):
    """Rows in sequence. Follows `flatout.data.reading.origins.Stream`."""

    def blocks(self, epoch: int, buffers: Buffers) -> Iterator[Block]:
        for block in self.inner.blocks(epoch, buffers):
            yield self._looked_up(block, buffers)


def looked_up(origin: Rows | Chunks | Stream, maps: Mapping[str, Lookup]) -> Any:
    """Return the same rows, with rows of tables in place of ids."""
    inner = origin.inner if isinstance(origin, _Lookup) else origin
    if is_rows(inner):
        return RowsLookup(inner, maps)
    return ChunksLookup(inner, maps) if is_chunks(inner) else StreamLookup(inner, maps)


def _check_column(inner: Any, name: str) -> None:
    column = next((c for c in inner.schema.columns if c.name == name), None)
    if column is None or column.role != "input":
        raise DataError(
            f"the model maps the ids of column {name!r}, and these data have no such input: "
            f"{', '.join(c.words for c in inner.schema.of_role('input'))}",
            where=inner.describe(),
            do="read them by the schema of the training data",
        )
    if column.dtype != "int64":
        raise DataError(
            f"the ids of column {name!r} are int64, and here it is {column.dtype}",
            where=inner.describe(),
            do='write dtype = "int64" for it into the schema',
        )
