"""HDF5 files, read by h5py.

A dataset whose values lie in one piece is mapped into memory and read without HDF5, in any order.
Others (in HDF5's chunks, packed, compact, virtual) are read some rows at a time; HDF5 lets one
thread in at a time. Damage is told apart as far as the HDF5 library finds it: damage in the tables
of a file without its own checksums can crash that library.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from flatout.data.block import Block, Values, offsets_of
from flatout.data.buffers import Buffers
from flatout.data.files import File, Paths, files_words, find
from flatout.data.indexed import files_digest
from flatout.data.pipeline import Pipeline
from flatout.data.schema import Given, Schema
from flatout.data.sources.arrays_in_files import (
    Names,
    Part,
    StoredArray,
    convert,
    schema_of,
    wanted_columns,
)
from flatout.data.sources.mapped import MappedRows
from flatout.data.sources.optional import require
from flatout.errors import DataError

if TYPE_CHECKING:
    import h5py

_TOLD = 20


def hdf5(
    paths: Paths,
    inputs: Names = "x",
    targets: Names | None = "y",
    weight: str | None = None,
    *,
    schema: Given | None = None,
) -> Pipeline:
    """Rows of datasets in HDF5 files.

    Dtypes stay as they are stored, in the byte order of this machine; unsigned integers of more
    than 8 bits become signed ones.

    Args:
        paths: as `files.find` takes them; several files follow each other, row after row.
        inputs: a dataset's name, such as "x" or "train/images", or a list of them, or a dict of
            them by the names that they are to have.
        targets: as `inputs`; None where there is no target.
        weight: the name of a dataset with a number a row.
        schema: a Schema, the path of one in TOML, or a dict, for other dtypes; its columns are
            those names.

    Raises:
        DataError: a file is damaged, cut off or lacks a dataset; a dataset holds no numbers, or
            has another number of rows than its neighbor.
    """
    require("h5py", "hdf5", "HDF5")
    return Pipeline(hdf5_rows(find(paths), inputs, targets, weight, schema))


def hdf5_rows(
    files: Sequence[File],
    inputs: Names = "x",
    targets: Names | None = "y",
    weight: str | None = None,
    schema: Given | None = None,
    *,
    piece_bytes: int = 4 << 20,
) -> MappedRows | HDF5Chunks:
    """Return the rows of `hdf5`: mapped files if possible, else rows read in pieces."""
    wanted = wanted_columns(inputs, targets, weight)
    parts: list[Part] = []
    pieces = []
    for file in files:
        with _opened(file) as opened:
            datasets = {
                column: _dataset(opened, value.name, file) for column, value in wanted.items()
            }
            parts.append(
                {
                    column: _place(data, wanted[column].name, file)
                    for column, data in datasets.items()
                }
            )
            pieces.append(max((data.chunks or (1,))[0] for data in datasets.values()))
    roles = {column: value.role for column, value in wanted.items()}
    made = schema_of("hdf5", schema, roles, parts)
    if all(place.offset is not None for part in parts for place in part.values()):
        return MappedRows("HDF5", parts, made, _unpack_nothing)
    return HDF5Chunks(parts, pieces, made, piece_bytes)


def _unpack_nothing(place: StoredArray) -> Any:
    raise AssertionError(f"{place.where} can be mapped")


class _Range(NamedTuple):
    """Rows that are read at once."""

    part: int
    start: int
    stop: int


class HDF5Chunks:
    """Rows of HDF5 files, some at a time. Follows `flatout.data.rows.Chunks`.

    Attributes:
        file_rows: the first row of each file, followed by the number of all rows.
    """

    def __init__(
        self, parts: Sequence[Part], pieces: Sequence[int], schema: Schema, piece_bytes: int
    ) -> None:
        self.schema = schema
        self._parts = list(parts)
        self._used = [column for column in schema.columns if column.role != "unused"]
        self._ranges: list[_Range] = []
        for at, (part, piece) in enumerate(zip(parts, pieces, strict=True)):
            places = [part[column.name] for column in self._used]
            row_bytes = sum(p.dtype.itemsize * math.prod(p.shape[1:]) for p in places)
            # Whole pieces of the file, so that each is unpacked once.
            step = piece * max(1, piece_bytes // (piece * row_bytes))
            rows = places[0].shape[0]
            self._ranges += [
                _Range(at, start, min(rows, start + step)) for start in range(0, rows, step)
            ]
        self.sizes = np.array([item.stop - item.start for item in self._ranges], np.int64)
        self._starts = offsets_of(self.sizes)
        self.file_rows = offsets_of([next(iter(part.values())).shape[0] for part in parts])

    @property
    def files(self) -> list[File]:
        return [next(iter(part.values())).file for part in self._parts]

    @cached_property
    def digest(self) -> str:
        """Over the files' sizes, their first and last bytes, the datasets' names and the schema."""
        names = [f"{name} {place.name}" for part in self._parts for name, place in part.items()]
        return files_digest(self.files, *names, self.schema.dumps())

    def read(self, chunk: int, buffers: Buffers) -> Block:
        part, start, stop = self._ranges[chunk]
        places = self._parts[part]
        file = self.files[part]
        file.check_unchanged()
        columns: dict[str, Values] = {}
        # Opened for each chunk: costs little beside unpacking, and nothing is left open or shared.
        with _opened(file) as opened:
            for column in self._used:
                place = places[column.name]
                shape = (stop - start, *column.shape)
                stored = buffers.empty(shape, place.dtype.newbyteorder("="))
                with _explained(f"{place.where}, rows {start:,} to {stop - 1:,}", file):
                    opened[place.name].read_direct(stored, np.s_[start:stop])
                values = stored
                if stored.dtype != column.numpy_dtype:
                    values = buffers.empty(shape, column.numpy_dtype)
                    convert(stored, values, place)
                columns[column.name] = values
        first = int(self._starts[chunk])
        return Block(columns, np.arange(first, first + stop - start))

    def where(self, number: int) -> str:
        at = int(np.searchsorted(self.file_rows, number, side="right")) - 1
        return f"{self.files[at].name}: row {number - self.file_rows[at]:,}"

    def describe(self) -> str:
        return files_words(self.files, "HDF5", self.file_rows[-1])

    def notes(self) -> list[str]:
        return []


@contextmanager
def _explained(where: str, file: File) -> Iterator[None]:
    try:
        yield
    except (OSError, RuntimeError, KeyError, TypeError, ValueError) as error:
        if isinstance(error, DataError):
            raise
        file.check_unchanged()
        raise DataError(
            f"the file is damaged, cut off, or packed by a filter that is not here: {error}",
            where=where,
            do="packed by a plugin: pip install hdf5plugin, and import it",
        ) from error


@contextmanager
def _opened(file: File) -> Iterator[h5py.File]:
    import h5py

    try:
        opened = h5py.File(file.path, "r")
    except (OSError, RuntimeError) as error:
        file.check_unchanged()
        raise DataError(
            f"the file is damaged, cut off or no HDF5 file: {error}", where=file.name
        ) from error
    with opened:
        yield opened


def _dataset(opened: h5py.File, name: str, file: File) -> h5py.Dataset:
    import h5py

    with _explained(f"{file.name}: {name}", file):
        dataset = opened.get(name)
        if isinstance(dataset, h5py.Dataset):
            return dataset
        names: list[str] = []
        opened.visititems(
            lambda path, item: names.append(str(path)) if isinstance(item, h5py.Dataset) else None
        )
    more = ", ..." if len(names) > _TOLD else ""
    raise DataError(
        f"expected a dataset {name!r}, found {', '.join(names[:_TOLD]) or 'none'}{more}",
        where=file.name,
        do="name them: inputs=..., targets=... (None where there is no target)",
    )


def _place(data: h5py.Dataset, name: str, file: File) -> StoredArray:
    where = f"{file.name}: {name}"
    with _explained(where, file):
        if data.shape is None:
            raise DataError("the dataset is empty: expected rows", where=where)
        return StoredArray(file, name, data.dtype, data.shape, _offset(data))


def _offset(data: h5py.Dataset) -> int | None:
    from h5py import h5d, h5t

    made = data.id.get_create_plist()
    in_one_piece = made.get_layout() == h5d.CONTIGUOUS and made.get_external_count() == 0
    if not in_one_piece or data.id.get_type() != h5t.py_create(data.dtype, logical=True):
        return None
    size = math.prod(data.shape) * data.dtype.itemsize
    # Nothing lies anywhere before the first value is written.
    offset: int | None = data.id.get_offset()
    return offset if data.id.get_storage_size() == size else None
