"""HDF5 files. Rows are read from the file by their index, so a file may be larger than memory."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from flatout.data.pipeline import Pipeline
from flatout.data.reading.block import Block, Numbers, offsets_of
from flatout.data.reading.buffers import Buffers
from flatout.data.reading.files import File, Paths, files_words, find
from flatout.data.reading.indexed import files_digest
from flatout.data.reading.origins import Rows
from flatout.data.reading.schema import Column, Role, Schema
from flatout.data.sources.arrays.array_files import Names, absent, damage_named, dtype_of_rows
from flatout.data.sources.arrays.arrays import Arrays
from flatout.data.sources.optional import require
from flatout.errors import DataError

if TYPE_CHECKING:
    import h5py

# Datasets of at most this number of bytes together are held in memory.
_MOST_HELD = 1 << 30
# Files that one reader keeps open.
_MOST_OPEN = 128
# Bytes of unpacked chunks that HDF5 keeps of each dataset.
_CHUNK_CACHE = 64 << 20
_DAMAGED = "the file is damaged, cut off, packed by an absent filter or no HDF5"


def hdf5(
    paths: Paths,
    inputs: Names = "x",
    targets: Names | None = "y",
    weight: str | None = None,
) -> Pipeline:
    """Read rows of datasets in HDF5 files; datasets of up to 1 GiB in all are held in memory.

    Dtypes are as for `npy`.

    Args:
        paths: path, glob pattern or URL, or a list of these; several files follow each other, row
            after row.
        inputs: name of a dataset, such as "x" or "train/images", a list of names, or a dict that
            maps the model's input names to names of datasets.
        targets: name, list or dict of names, as for `inputs`; None without targets.
        weight: name of a dataset with one weight for each row.

    Raises:
        DataError: a file is damaged, cut off or lacks a dataset; a dataset holds no numbers, or
            has another number of rows than the other datasets of its file.
    """
    require("h5py", "hdf5", "HDF5")
    rows = HDF5Rows(find(paths), inputs, targets, weight)
    return Pipeline(rows if rows.nbytes > _MOST_HELD else rows.in_memory())


class _Found(NamedTuple):
    schema: Schema
    rows: int
    in_chunks: bool


class HDF5Rows(Rows):
    """Rows of datasets in HDF5 files. Follows `flatout.data.reading.origins.Rows`.

    Each process opens the files for itself. HDF5 lets one thread in at a time.
    """

    def __init__(
        self, files: Sequence[File], inputs: Names, targets: Names | None, weight: str | None
    ) -> None:
        self.files = list(files)
        self._forget()
        self._datasets, roles = _wanted(inputs, targets, weight)
        found = [self._look(at, roles) for at in range(len(self.files))]
        self.schema = found[0].schema
        for at, other in enumerate(found):
            self._check_equal(at, other.schema)
        self.file_rows = offsets_of([other.rows for other in found])
        self.rows = int(self.file_rows[-1])
        self.random = not any(other.in_chunks for other in found)
        if self.rows == 0:
            raise DataError("the datasets hold no rows", where=self.files[0].name)

    def _forget(self) -> None:
        self._opened = lru_cache(maxsize=_MOST_OPEN)(_opened)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_opened"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget()

    @property
    def nbytes(self) -> int:
        row = 0
        for column in self.schema.columns:
            row += column.numpy_dtype.itemsize * math.prod(column.shape)
        return self.rows * row

    @cached_property
    def digest(self) -> str:
        """16 hex digits over the files' sizes, first and last bytes, dataset names, and schema."""
        names = [f"{column} {dataset}" for column, dataset in self._datasets.items()]
        return files_digest(self.files, *names, self.schema.dumps())

    def in_memory(self) -> Arrays:
        found = self.take(np.arange(self.rows), Buffers()).columns
        parts: list[Any] = []
        roles: tuple[Role, ...] = ("input", "target", "weight")
        for role in roles:
            named = {column.name: found[column.name] for column in self.schema.of_role(role)}
            parts.append(named if len(named) > 1 else next(iter(named.values()), None))
        return Arrays(*parts)

    def take(self, numbers: Numbers, buffers: Buffers) -> Block:
        if len(numbers) and (numbers.min() < 0 or numbers.max() >= self.rows):
            raise IndexError(f"expected rows from 0 to {self.rows - 1:,}")
        columns: dict[str, npt.NDArray[Any]] = {
            column.name: buffers.empty((len(numbers), *column.shape), column.numpy_dtype)
            for column in self.schema.columns
        }
        order = np.argsort(numbers, kind="stable")
        files = np.searchsorted(self.file_rows, numbers[order], side="right") - 1
        rows = numbers[order] - self.file_rows[files]
        for at in np.unique(files).tolist():
            self.files[at].check_unchanged()
            opened = self._open(at)  # stays open while it is used here
            own = np.flatnonzero(files == at)
            # Rows that follow each other are read at once.
            ends = [0, *(np.flatnonzero(np.diff(rows[own]) != 1) + 1).tolist(), len(own)]
            for name, out in columns.items():
                dataset = self._dataset(opened, at, name)
                for start, stop in pairwise(ends):
                    first, last = int(rows[own[start]]), int(rows[own[stop - 1]])
                    where = f"{self._where(at, name)}, rows {first:,} to {last:,}"
                    with damage_named(where, _DAMAGED):
                        out[order[own[start:stop]]] = dataset[first : last + 1]
        return Block(columns, numbers)

    def where(self, number: int) -> str:
        at = int(np.searchsorted(self.file_rows, number, side="right")) - 1
        return f"{self.files[at].name}: row {number - self.file_rows[at]:,}"

    def describe(self) -> str:
        return files_words(self.files, "HDF5", self.rows)

    def _where(self, at: int, column: str) -> str:
        return f"{self.files[at].name}: {self._datasets[column]}"

    def _open(self, at: int) -> h5py.File:
        with damage_named(self.files[at].name, _DAMAGED):
            # A process that was forked opens the file anew.
            return self._opened(self.files[at], os.getpid())

    def _dataset(self, opened: h5py.File, at: int, column: str) -> h5py.Dataset:
        import h5py

        with damage_named(self._where(at, column), _DAMAGED):
            dataset = opened.get(self._datasets[column])
            if isinstance(dataset, h5py.Dataset):
                return dataset
            names: list[str] = []
            opened.visititems(
                lambda path, item: names.append(path) if isinstance(item, h5py.Dataset) else None
            )
        raise absent("a dataset", self._datasets[column], names, self.files[at])

    def _look(self, at: int, roles: Mapping[str, Role]) -> _Found:
        columns: list[Column] = []
        counts: list[int] = []
        in_chunks = False
        # Close the file at the end: while it is open, HDF5 does not show that it was rewritten.
        with damage_named(self.files[at].name, _DAMAGED), _opened(self.files[at], 0) as opened:
            for name, role in roles.items():
                dataset, where = self._dataset(opened, at, name), self._where(at, name)
                if dataset.shape is None or 0 in dataset.shape[1:]:
                    raise DataError("the dataset is empty: expected rows", where=where)
                dtype: Any = str(dtype_of_rows(dataset, where))
                columns.append(Column(name=name, dtype=dtype, shape=dataset.shape[1:], role=role))
                counts.append(len(dataset))
                in_chunks |= dataset.chunks is not None
                if counts[-1] != counts[0]:
                    raise DataError(
                        f"expected {counts[0]:,} rows, as {self._where(at, columns[0].name)} has, "
                        f"found {counts[-1]:,}",
                        where=where,
                    )
        return _Found(Schema(format="hdf5", columns=tuple(columns)), counts[0], in_chunks)

    def _check_equal(self, at: int, schema: Schema) -> None:
        for first, own in zip(self.schema.columns, schema.columns, strict=True):
            if own != first:
                raise DataError(
                    f"expected rows of {first.words}, as in {self.files[0].name}, found "
                    f"{own.words}",
                    where=self._where(at, own.name),
                )


def _opened(file: File, process: int) -> h5py.File:
    import h5py

    return h5py.File(file.path, "r", rdcc_nbytes=_CHUNK_CACHE)


def _wanted(
    inputs: Names, targets: Names | None, weight: str | None
) -> tuple[dict[str, str], dict[str, Role]]:
    datasets: dict[str, str] = {}
    roles: dict[str, Role] = {}
    given: dict[Role, Names | None] = {"input": inputs, "target": targets, "weight": weight}
    for role, names in given.items():
        if not isinstance(names, Mapping):
            names = {name: name for name in ([names] if isinstance(names, str) else names or ())}
        for column, dataset in names.items():
            if column in datasets:
                raise DataError(
                    f"{column!r} is named twice, the second time as {role}",
                    do=f"give it another name: {{'other': {dataset!r}}}",
                )
            datasets[column], roles[column] = dataset, role
    if "input" not in roles.values():
        raise DataError("expected at least one input, found none")
    return datasets, roles
