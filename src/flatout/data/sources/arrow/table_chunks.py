"""Tables in parts: Parquet files by row group, Arrow IPC files by record batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import product
from typing import Any, NamedTuple, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import ipc

from flatout.data.reading.block import Block, offsets_of
from flatout.data.reading.buffers import Buffers
from flatout.data.reading.changed import Changes, exact_up_to
from flatout.data.reading.files import File, files_words
from flatout.data.reading.indexed import files_digest
from flatout.data.reading.origins import Gather, alone
from flatout.data.reading.schema import Given, Schema
from flatout.data.reading.threads import Pool
from flatout.data.sources.arrow.arrow_columns import (
    BadValue,
    may_be_rounded,
    note_rounding,
    note_rounding_of,
    to_columns,
)
from flatout.data.sources.arrow.arrow_schema import (
    ColumnOptions,
    check_options,
    check_schema,
    given_schema,
    infer_schema,
    is_text,
    listed,
    used_names,
)
from flatout.data.sources.arrow.vocabulary import (
    Texts,
    left_out_notes,
    merged,
    notes_of,
    texts_of,
    with_vocabularies,
)
from flatout.errors import DataError
from flatout.measure import usable_cpus
from flatout.words import size_words

# Decoded bytes of a part from which on a note advises smaller parts.
_LARGE = 1 << 30


class TableFile(Protocol):
    """A file that holds a table in parts.

    Attributes:
        kind: kind of the file, for the user.
        part: name of a part, for the user.
        file: file that holds the table.
        sizes: number of rows of each part.
        largest: size in bytes of the largest part after decoding, or 0 if it is not known.
        fields: the types of the columns.
    """

    kind: str
    part: str
    file: File
    sizes: list[int]
    largest: int
    fields: dict[str, pa.DataType]

    def read(self, part: int, names: Sequence[str]) -> pa.Table:
        """Return some columns of a part."""
        ...

    def may_exceed(self, names: Sequence[str], limit: int) -> list[str]:
        """Return the columns among `names` whose numbers in the first part may exceed `limit`."""
        ...


class ParquetFile:
    kind, part = "Parquet", "row group"

    def __init__(self, file: File) -> None:
        self.file = file
        with _explained(file, "the file is damaged, unfinished or no Parquet file"):
            self._metadata = pq.read_metadata(file.path)
            self.fields = _types(self._metadata.schema.to_arrow_schema(), file)
            groups = [self._metadata.row_group(i) for i in range(self._metadata.num_row_groups)]
        self.sizes = [group.num_rows for group in groups]
        if min(self.sizes, default=0) < 0:
            raise DataError(
                "the file is damaged: a row group has fewer than no rows", where=file.name
            )
        self.largest = max((group.total_byte_size for group in groups), default=0)

    def read(self, part: int, names: Sequence[str]) -> pa.Table:
        # Opened for each part, which costs little compared with decoding, so that threads share
        # nothing. Not mapped: a file that is truncated while it is read would kill the process.
        with pq.ParquetFile(
            self.file.path, metadata=self._metadata, page_checksum_verification=True
        ) as opened:
            return opened.read_row_group(part, columns=list(names), use_threads=False)

    def may_exceed(self, names: Sequence[str], limit: int) -> list[str]:
        """Return the columns whose numbers in the first row group may exceed `limit`."""
        group, within = self._metadata.row_group(0), set()
        for column in map(group.column, range(group.num_columns)):
            if column.path_in_schema not in names or not column.is_stats_set:
                continue
            known = column.statistics
            if known.has_min_max and -limit <= known.min and known.max <= limit:
                within.add(column.path_in_schema)
        return [name for name in names if name not in within]


class ArrowFile:
    """An Arrow IPC file, whose parts are record batches."""

    kind, part = "Arrow", "record batch"
    largest = 0

    def __init__(self, file: File) -> None:
        self.file = file
        with _explained(file, "the file cannot be read"), open(file.path, "rb") as begin:
            magic = begin.read(4)
        if magic == b"FEA1":
            raise DataError(
                "expected an Arrow IPC file, found Feather of version 1",
                where=file.name,
                do="write it again: pyarrow.feather.write_feather(table, path)",
            )
        if magic == b"\xff\xff\xff\xff":
            raise DataError(
                "expected an Arrow IPC file, found a stream, which has no table of its batches",
                where=file.name,
                do="write it as a file: pyarrow.ipc.new_file",
            )
        with (
            _explained(file, "the file is damaged, unfinished or no Arrow IPC file"),
            pa.OSFile(file.path) as source,
        ):
            self._schema = ipc.open_file(source).schema
            self.fields = _types(self._schema, file)
            # The footer has no sizes, so one column of each batch is read, best one of numbers.
            numbers = (at for at, t in enumerate(self._schema.types) if pa.types.is_primitive(t))
            options = ipc.IpcReadOptions(included_fields=[next(numbers, 0)], use_threads=False)
            reader = ipc.open_file(source, options=options)
            batches = range(reader.num_record_batches)
            self.sizes = [reader.get_batch(number).num_rows for number in batches]

    def read(self, part: int, names: Sequence[str]) -> pa.Table:
        wanted = [self._schema.get_field_index(name) for name in names]
        options = ipc.IpcReadOptions(included_fields=wanted, use_threads=False)
        with pa.OSFile(self.file.path) as source:
            batch = ipc.open_file(source, options=options).get_batch(part)
        # Arrow does not check the offsets and dictionary indices in a file.
        batch.validate(full=True)
        return pa.Table.from_batches([batch])

    def may_exceed(self, names: Sequence[str], limit: int) -> list[str]:
        """Return all of `names`: the file has no statistics."""
        return list(names)


class _Part(NamedTuple):
    file: int
    number: int  # number in its file
    start: int  # rows of the file before this part


class TableChunks:
    """Parts of tables in files. Follows `flatout.data.reading.origins.Chunks`.

    Attributes:
        changes: keeps a line for each column in which reading has changed a value.
        file_rows: the first row of each file, followed by the number of all rows.
    """

    def __init__(
        self, files: Sequence[TableFile], schema: Schema, notes: Sequence[str] = ()
    ) -> None:
        self._notes = list(notes)
        for file in files:
            check_schema(schema, file.fields, file.file.name)
        self.schema = schema
        self.changes = Changes()
        self._files = list(files)
        self.files = [file.file for file in files]
        self._names = used_names(schema)
        self._parts = [
            _Part(at, number, int(start))
            for at, file in enumerate(files)
            for number, start in enumerate(offsets_of(file.sizes)[:-1])
        ]
        self.sizes = np.array([size for file in files for size in file.sizes], np.int64)
        self._starts = offsets_of(self.sizes)
        self.file_rows = offsets_of([sum(file.sizes) for file in files])

    @cached_property
    def digest(self) -> str:
        return files_digest([file.file for file in self._files], self.schema.dumps())

    def read(self, chunk: int, buffers: Buffers) -> Block:
        at = self._parts[chunk]
        file = self._files[at.file]
        start, stop = (int(number) for number in self._starts[chunk : chunk + 2])
        file.file.check_unchanged()
        with _explained(file.file, f"{file.part} {at.number} cannot be decoded"):
            table = file.read(at.number, self._names)
            if len(table) != stop - start:
                raise DataError(
                    f"expected {stop - start:,} rows, found {len(table):,}",
                    where=f"{file.file.name}: {file.part} {at.number}",
                )

            def large(name: str, values: Any, out: Any, row_of: Callable[[int], int]) -> None:
                note_rounding(
                    self.changes, name, values, out, lambda at: self.where(start + row_of(at))
                )

            try:
                columns = to_columns(table, self.schema, buffers, large)
            except BadValue as bad:
                raise DataError(
                    bad.what,
                    where=self.where(start + bad.row),
                    do="correct the file, or give the column another dtype or a default in the "
                    "schema",
                ) from None
        return Block(columns, np.arange(start, stop))

    def where(self, number: int) -> str:
        chunk = int(np.searchsorted(self._starts, number, side="right")) - 1
        at = self._parts[chunk]
        file = self._files[at.file]
        row = at.start + number - int(self._starts[chunk])
        return f"{file.file.name}: row {row:,} ({file.part} {at.number})"

    def describe(self) -> str:
        files = [file.file for file in self._files]
        return files_words(files, self._files[0].kind, self._starts[-1])

    def notes(self) -> list[str]:
        """Return lines on the schema, on changed values, and on parts that need much memory."""
        notes = [*self.changes.notes(), *self._notes]
        largest = max(self._files, key=lambda value: value.largest)
        if largest.largest < _LARGE:
            return notes
        return [
            *notes,
            f"a {largest.part} of {largest.file.name} takes {size_words(largest.largest)} "
            "decoded, and each thread decodes one: write smaller ones (row_group_size)",
        ]

    def skipped(self, gather: Gather = alone) -> list[str]:
        return self.changes.new_notes(gather)

    def look(self) -> None:
        """Note values that reading changes in the first part, if its statistics allow any."""
        file = self._files[0]
        names = list(may_be_rounded(file.fields, self.schema))
        names = file.may_exceed(names, exact_up_to(np.float32)) if file.sizes else []
        if names:
            with _explained(file.file, f"{file.part} 0 cannot be decoded"):
                note_rounding_of(file.read(0, names), self.schema, self.changes, self.where)


def _types(schema: pa.Schema, file: File) -> dict[str, pa.DataType]:
    types = {field.name: field.type for field in schema}
    if len(types) < len(schema):
        twice = {name for name in schema.names if schema.names.count(name) > 1}
        raise DataError(f"several columns are called {', '.join(sorted(twice))}", where=file.name)
    return types


@contextmanager
def _explained(file: File, what: str) -> Iterator[None]:
    try:
        yield
    except (OSError, UnicodeDecodeError, pa.ArrowException) as error:
        file.check_unchanged()
        raise DataError(f"{what}: {error}", where=file.name) from error


def table_chunks(
    format: str,
    files: Sequence[TableFile],
    schema: Given | None,
    wanted: ColumnOptions,
    allow_nan: bool | None = None,
) -> TableChunks:
    """Open files with a given schema, or with one inferred from the first file."""
    options = {} if allow_nan is None else {"allow_nan": allow_nan}
    if schema is not None:
        given = given_schema(schema, format, wanted, options)
        check_options(given)
        return TableChunks(files, given, left_out_notes(given, files[0].fields))
    fields = files[0].fields
    for file in files[1:]:
        # If inputs are named, other columns do not matter.
        if wanted.inputs is None and (fields.keys() ^ file.fields.keys()) - set(
            listed(wanted.unused)
        ):
            raise DataError(
                f"expected the columns of {files[0].file.name}: {', '.join(fields)}; found "
                f"{', '.join(file.fields)}",
                where=file.file.name,
                do="name those wanted: inputs=[...], or those to leave out: unused=[...]",
            )
    wanted = with_vocabularies(wanted, fields, lambda names, few: _texts(files, names, few))
    inferred = infer_schema(format, fields, wanted, options)
    chunks = TableChunks(files, inferred, notes_of(inferred.options, wanted.numberish))
    chunks.look()
    return chunks


def _texts(files: Sequence[TableFile], names: Sequence[str], few: bool) -> dict[str, Texts]:
    parts = [(file, part) for file in files for part in range(len(file.sizes))]
    first = files[0]
    for pair, name in product(files[1:], names):
        if is_text(pair.fields.get(name, first.fields[name])) != is_text(first.fields[name]):
            raise DataError(
                f"column {name!r}: expected {first.fields[name]} as in {first.file.name}, found "
                f"{pair.fields[name]}",
                where=pair.file.name,
            )

    def look(file: TableFile, part: int) -> dict[str, Texts]:
        with _explained(file.file, f"{file.part} {part} cannot be decoded"):
            return texts_of(file.read(part, names), names)

    with Pool(usable_cpus()) as pool:
        texts = merged(pool.map(lambda part: look(*part), parts[:1] if few else parts))
    return {name: texts.get(name, Texts(frozenset(), 0)) for name in names}
