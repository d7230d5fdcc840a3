"""Flatout's own format: decoded rows in a folder, which `flatout data convert` writes."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from flatout.data.digests.digests import digest_of
from flatout.data.pipeline import Pipeline
from flatout.data.reading.block import Block, Numbers
from flatout.data.reading.buffers import Buffers
from flatout.data.reading.origins import Rows
from flatout.data.reading.schema import Given, Schema, as_schema
from flatout.data.stores.row_folder import RowFolder
from flatout.data.stores.row_store import Field
from flatout.errors import DataError
from flatout.recipe import parse
from flatout.words import size_words

# Bytes of rows up to which a column is read from end to end, as this takes only a moment.
_QUICK = 1 << 30


class FolderRows(Rows):
    """Rows of a folder, mapped into memory. Follows `flatout.data.reading.origins.Rows`."""

    random = True

    def __init__(self, path: str | os.PathLike[str], schema: Given | None = None) -> None:
        self.path = Path(path)
        self._folder = RowFolder(self.path)
        self.rows = self._folder.rows
        self._fields = {field.name: field for field in self._folder.store.layout.fields}
        self.schema = self._written() if schema is None else as_schema(schema, "rows")
        self._check()

    def __getstate__(self) -> dict[str, Any]:
        # Another process maps the files itself.
        return {"path": self.path, "schema": self.schema}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    def _written(self) -> Schema:
        text = self._folder.meta.get("schema")
        if text is None:
            raise DataError(
                "the folder is the cache of a pipeline, which alone knows what is in it",
                where=str(self.path),
                do="make a folder to be read with flatout data convert",
            )
        try:
            return as_schema(parse(text), "rows")
        except (tomllib.TOMLDecodeError, TypeError, AttributeError, RecursionError) as error:
            raise DataError(
                f"the schema in meta.json is no TOML: {error}", where=str(self.path)
            ) from error

    def _check(self) -> None:
        for column in self.schema.columns:
            field = self._fields.get(column.name)
            result = None if field is None else (field.dtype, field.shape, field.ragged)
            if result != (column.numpy_dtype, column.shape, column.ragged):
                words = ", ".join(map(_words, self._fields.values()))
                raise DataError(
                    f"the schema has a column {column.words}, but the rows hold {words}",
                    where=str(self.path),
                    do="only roles, padding and names of lengths can be changed here; for other "
                    "columns convert the data again",
                )

    @cached_property
    def digest(self) -> str:
        return digest_of(repr(sorted(self._folder.meta["files"].items())), self.schema.dumps())

    def take(self, numbers: Numbers, buffers: Buffers) -> Block:
        try:
            return self._folder.take(numbers, buffers)
        except DataError:
            raise
        except (IndexError, ValueError, MemoryError) as error:
            if len(numbers) and (numbers.min() < 0 or numbers.max() >= self.rows):
                raise
            # Sizes were checked when the folder was opened, but not the positions of ragged values.
            raise DataError(
                f"a row points to values that are not there: {error}",
                where=str(self.path),
                do="the folder is damaged: delete it and convert the data again",
            ) from error

    def targets(self) -> npt.NDArray[Any] | None:
        columns = self.schema.of_role("target")
        if len(columns) != 1 or columns[0].ragged or columns[0].shape:
            return None
        if self._folder.store.rows.nbytes > _QUICK:
            return None
        return self._column(self._fields[columns[0].name])[:, 0]

    def lengths(self) -> Numbers | None:
        lengths = list(self._lengths())
        return np.maximum.reduce(lengths) if lengths else None

    def _lengths(self) -> Iterator[Numbers]:
        for field in self._fields.values():
            if field.ragged:  # the row holds the position and the number of the values
                yield self._column(field._replace(dtype=np.dtype(np.int64)))[:, 1]

    def _column(self, field: Field) -> npt.NDArray[Any]:
        self._folder.verify_rows()
        raw = self._folder.store.rows[:, field.offset : field.offset + field.width]
        return np.ascontiguousarray(raw).view(field.dtype)

    def where(self, number: int) -> str:
        return f"{self.path}: row {number:,}"

    def describe(self) -> str:
        size = sum(file["size"] for file in self._folder.meta["files"].values())
        return f"row cache {self.path}, {size_words(size)}, {self.rows:,} rows"

    def notes(self) -> list[str]:
        return [f"when it was converted: {note}" for note in self._folder.meta.get("notes", [])]

    def verify(self) -> None:
        self._folder.verify()


def _words(field: Field) -> str:
    shape = " ragged" if field.ragged else "".join(f" x{size}" for size in field.shape)
    return f"{field.name} {field.dtype}{shape}"


def rows(path: str | os.PathLike[str], *, schema: Given | None = None) -> Pipeline:
    """Read rows of a folder that `flatout data convert` has written.

    Rows equal those of the converted source, bit by bit, and need no decoding. A row is found by
    its number times the length of a row, in a file that is mapped into memory.

    Args:
        path: path of the folder.
        schema: a Schema, the path of one in TOML, or a dict, for other roles; None means the
            written roles. `rows(path).schema.with_roles(clicks="target")` makes one.

    Raises:
        DataError: the folder has no row cache or is damaged, or the schema has other columns.
    """
    return Pipeline(FolderRows(path, schema))
