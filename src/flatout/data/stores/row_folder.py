"""Rows of a RowStore in a folder: Flatout's own format, mapped into memory for reading.

    rows.bin         the rows, in sequence
    ragged-0.bin     values of the first ragged column, and so on
    meta.json        layout, number of rows, form, digest, checksums; written last

While a folder is being filled, its name ends in `.part`.
"""

from __future__ import annotations

import fcntl
import math
import mmap
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from flatout import cache_folder
from flatout.atomic_file import atomic_write, flush_folder
from flatout.data.batches.form import Form, Leaf
from flatout.data.reading.block import Block, Numbers, Values
from flatout.data.reading.buffers import Buffers
from flatout.data.stores.checksums import Checksums, Verified, sealed, unsealed
from flatout.data.stores.row_store import PLACE, Arena, Field, Layout, RowStore
from flatout.errors import DataError, as_data_error

Opener: TypeAlias = Callable[[str, int], int]

# Version of the folder's format.
VERSION = 2
_DAMAGED = (KeyError, TypeError, ValueError, AttributeError, OverflowError, OSError, RecursionError)
_AGAIN = "the folder is damaged: delete it and make it again"
# Bytes that are verified at once, a whole number of blocks.
_VERIFIED = 64 << 20


class FileArena:
    """Values at the end of a file, mapped again after the file has grown."""

    def __init__(self, path: Path, dtype: np.dtype[Any], opener: Opener | None) -> None:
        self._dtype = dtype
        self._file = open(path, "a+b", buffering=0, opener=opener)  # noqa: SIM115
        self._mapped = np.empty(0, dtype)
        self._end = os.fstat(self._file.fileno()).st_size // dtype.itemsize

    def append(self, values: npt.NDArray[Any]) -> int:
        start = self._end
        data = np.ascontiguousarray(values).data.cast("B")
        place = start * self._dtype.itemsize
        while data:
            written = os.pwrite(self._file.fileno(), data, place)
            data, place = data[written:], place + written
        self._end += len(values)
        return start

    def values(self) -> npt.NDArray[Any]:
        mapped = self._mapped
        if len(mapped) < self._end:
            mapped = _mapped(self._file.fileno(), self._end * self._dtype.itemsize, self._dtype)
            self._mapped = mapped
        return mapped

    def check(self, places: npt.NDArray[Any]) -> None:
        """Do nothing: values that this process has written need no check."""

    def flush(self) -> None:
        os.fsync(self._file.fileno())


class Filling:
    """A folder that only this process fills. Files that a killed process left are removed.

    Attributes:
        target: path of the finished folder.
        part: path of the folder while it is filled.
        store: store of the rows.
        filled: bool of shape (rows,): whether a row was stored.
    """

    def __init__(
        self, target: Path, layout: Layout, rows: int, digest: str, *, private: bool = False
    ) -> None:
        self.target, self._digest = target, digest
        self._opener = opener = cache_folder.private if private else None
        self.part = target.with_name(target.name + ".part")
        self.part.parent.mkdir(parents=True, exist_ok=True)
        self.part.mkdir(mode=0o700 if private else 0o777, exist_ok=True)
        if not (self.part / "lock").exists() and any(self.part.iterdir()):
            raise DataError(
                "this folder is needed to write in, but holds files that Flatout has not made",
                where=str(self.part),
                do="move it elsewhere, or choose another target",
            )
        self._lock = open(self.part / "lock", "w", opener=opener)  # noqa: SIM115
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        for old in self.part.iterdir():
            if old.name != "lock":
                old.unlink()
        self._rows_file = open(self.part / "rows.bin", "w+b", buffering=0, opener=opener)  # noqa: SIM115
        # Rows are written through mapped memory, where a full disk would kill the process. So their
        # space is allocated now.
        os.posix_fallocate(self._rows_file.fileno(), 0, rows * layout.stride)
        self._mapped = mmap.mmap(self._rows_file.fileno(), rows * layout.stride)
        matrix = np.frombuffer(self._mapped, np.uint8).reshape(rows, layout.stride)
        ragged = [field for field in layout.fields if field.ragged]
        self._arenas = [
            FileArena(self.part / f"ragged-{i}.bin", field.dtype, opener)
            for i, field in enumerate(ragged)
        ]
        self.store = RowStore(layout, matrix, self._arenas)
        self.filled = np.zeros(rows, bool)

    def put(self, slots: Numbers, columns: dict[str, Values]) -> None:
        self.store.put(slots, columns)
        self.filled[slots] = True

    def finish(self, form: Form | None, extra: dict[str, Any]) -> Path:
        """Write the metadata and rename the folder to its final name; return its path."""
        self._mapped.flush()
        os.fsync(self._rows_file.fileno())
        for arena in self._arenas:
            arena.flush()
        names = ["rows.bin", *(f"ragged-{i}.bin" for i in range(len(self._arenas)))]
        meta = {
            "version": VERSION,
            "rows": len(self.filled),
            "digest": self._digest,
            **_layout_words(self.store.layout),
            "form": None if form is None else [_tree_words(tree) for tree in form],
            "files": {name: Checksums.of(self.part / name).words() for name in names},
            **extra,
        }
        path, draft = self.part / "meta.json", "meta.json.part"
        with atomic_write(path, durable=True, opener=self._opener, draft=draft) as file:
            file.write(sealed(meta))
        if self.target.exists():  # another process has finished the folder first
            shutil.rmtree(self.part)
            return self.target
        os.rename(self.part, self.target)
        flush_folder(self.target.parent)
        return self.target

    def close(self) -> None:
        self._lock.close()


class RowFolder:
    """A finished folder, for reading.

    Attributes:
        form: the columns that hold inputs, targets and weights, or None if a schema states it.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.meta = read_meta(self.path)
        try:
            self._open()
        except DataError:
            raise
        except _DAMAGED as error:
            raise DataError(
                f"the folder is damaged: {type(error).__name__}: {error}",
                where=str(self.path / "meta.json"),
                do="delete it and make it again",
            ) from error

    def _open(self) -> None:
        layout = _layout_of(self.meta)
        _check_layout(layout)
        self.rows = self.meta["rows"]
        if type(self.rows) is not int or self.rows < 0:
            raise ValueError(f"expected a number of rows, found {self.rows!r:.80}")
        ragged = [field for field in layout.fields if field.ragged]
        names = ["rows.bin", *(f"ragged-{i}.bin" for i in range(len(ragged)))]
        if sorted(self.meta["files"]) != sorted(names):
            raise ValueError(f"expected the files {names}, found {list(self.meta['files'])}")
        self._files = [_Bytes(self.path / name, self.meta["files"][name]) for name in names]
        if len(self._files[0].bytes) != self.rows * layout.stride:
            raise ValueError(f"{self.rows:,} rows of {layout.stride:,} bytes are another size")
        matrix = self._files[0].bytes.reshape(self.rows, layout.stride)
        arenas: list[Arena] = [
            _ReadArena(file, field.dtype)
            for file, field in zip(self._files[1:], ragged, strict=True)
        ]
        self.store = RowStore(layout, matrix, arenas)
        self.store.check = self._check
        form = self.meta["form"]
        self.form = None if form is None else Form(*(_tree_of(tree) for tree in form))

    def take(self, numbers: Numbers, buffers: Buffers) -> Block:
        return Block(self.store.get(numbers, buffers), numbers)

    def _check(self, slots: Numbers) -> None:
        for file in self._files:
            file.check_unchanged()
        starts = np.asarray(slots, np.int64) * self.store.layout.stride
        self._files[0].check(starts, starts + self.store.layout.stride)

    def verify_rows(self) -> None:
        """Compare the bytes of all rows with their checksums, without those of ragged values."""
        self._files[0].check_all()

    def verify(self) -> None:
        for file in self._files:
            file.verify()


class _Bytes:
    """A mapped file of a folder, whose blocks are compared with their checksums."""

    def __init__(self, path: Path, words: Any) -> None:
        self._path = path
        self._sums = Checksums.from_words(words)
        size = _size(path)
        if not path.is_file():
            raise DataError("expected a file", where=str(path), do=_AGAIN)
        if size != self._sums.size:
            raise DataError(
                f"expected {self._sums.size:,} bytes, found {size:,}", where=str(path), do=_AGAIN
            )
        with open(path, "rb") as file:
            self._map = mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ) if size else None
        self.bytes = np.frombuffer(self._map or b"", np.uint8)
        self._seen = _state(path)
        self._verified = Verified(str(path), self._sums, _AGAIN)

    def check_unchanged(self) -> None:
        if _state(self._path) != self._seen:
            raise DataError(
                "the file has changed while it was being read",
                where=str(self._path),
                do="delete the folder and make it again; nothing else may write to it",
            )

    def check(self, starts: Numbers, stops: Numbers) -> None:
        if not self._verified.done and len(starts):
            if int(starts.min()) < 0 or int(stops.max()) > len(self.bytes):
                raise IndexError("a range beyond the file")
            self._verified.check(starts, stops, self._read)

    def check_all(self) -> None:
        self.check_unchanged()
        self._verified.check_all(self._read)

    def verify(self) -> None:
        self.check_unchanged()
        for start in range(0, len(self.bytes), _VERIFIED):
            self._verified.compare(start, self.bytes[start : start + _VERIFIED])

    def _read(self, start: int, stop: int) -> npt.NDArray[np.uint8]:
        if self._map is not None:
            # The disk then reads the rest while the start is compared.
            first = start - start % mmap.PAGESIZE
            self._map.madvise(mmap.MADV_WILLNEED, first, stop - first)
        return self.bytes[start:stop]


class _ReadArena:
    def __init__(self, file: _Bytes, dtype: np.dtype[Any]) -> None:
        self._file, self._item = file, dtype.itemsize
        self._values = file.bytes.view(dtype)

    def append(self, values: npt.NDArray[Any]) -> int:
        raise AssertionError("a whole folder is only read")

    def values(self) -> npt.NDArray[Any]:
        return self._values

    def check(self, places: npt.NDArray[Any]) -> None:
        there = places[places["length"] > 0]
        starts = there["start"] * self._item
        self._file.check(starts, starts + there["length"] * self._item)


def read_meta(path: Path) -> dict[str, Any]:
    try:
        if (path / "meta.json").exists() and not (path / "meta.json").is_file():
            raise ValueError("it is no file")
        meta = unsealed((path / "meta.json").read_text())
    except FileNotFoundError as error:
        raise DataError(
            "no row cache is here: meta.json is missing",
            where=str(path),
            do="make one with flatout data convert",
        ) from error
    except NotADirectoryError as error:
        raise DataError("expected a folder of rows, found a file", where=str(path)) from error
    except (OSError, ValueError) as error:
        raise DataError(
            f"meta.json cannot be read: {error}",
            where=str(path / "meta.json"),
            do="delete the folder and make it again",
        ) from error
    if meta.get("version") != VERSION:
        raise DataError(
            f"expected a row cache of version {VERSION}, found {meta.get('version')}",
            where=str(path),
            do="delete it and make it again",
        )
    return meta


def _mapped(number: int, size: int, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    if size == 0:
        return np.empty(0, dtype)
    return np.frombuffer(mmap.mmap(number, size, prot=mmap.PROT_READ), dtype)


def _state(path: Path) -> tuple[int, int]:
    try:
        stat = os.stat(path)
    except OSError:
        return -1, -1
    return stat.st_size, stat.st_mtime_ns


def _size(path: Path) -> int:
    with as_data_error("cannot be read", str(path)):
        return path.stat().st_size


def _layout_words(layout: Layout) -> dict[str, Any]:
    fields = [
        {**field._asdict(), "dtype": str(field.dtype), "shape": list(field.shape)}
        for field in layout.fields
    ]
    return {"stride": layout.stride, "fields": fields}


def _check_layout(layout: Layout) -> None:
    for field in layout.fields:
        kind = field.dtype.kind in "biuf" and field.dtype.isnative
        sizes = [field.offset, field.width, *field.shape]
        item = PLACE.itemsize if field.ragged else field.dtype.itemsize
        whole = all(type(size) is int and size >= 0 for size in sizes)
        if not kind or not whole or field.width != math.prod(field.shape) * item:
            raise ValueError(f"no row can hold this column: {field!r:.200}")
        if field.offset % min(item, 8) or field.offset + field.width > layout.stride:
            raise ValueError(f"the column lies outside of its row: {field!r:.200}")
        if (field.ragged and field.shape) or (field.channels_last and len(field.shape) != 3):
            raise ValueError(f"the column's shape does not fit: {field!r:.200}")
    names = {field.name for field in layout.fields if isinstance(field.name, str)}
    if not names or len(names) < len(layout.fields):
        raise ValueError("expected columns, each with its own name")
    if type(layout.stride) is not int or layout.stride < 1:
        raise ValueError(f"expected the size of a row, found {layout.stride!r:.80}")


def _layout_of(meta: dict[str, Any]) -> Layout:
    fields = tuple(
        Field(**{**field, "dtype": np.dtype(field["dtype"]), "shape": tuple(field["shape"])})
        for field in meta["fields"]
    )
    return Layout(fields, meta["stride"])


def _tree_words(tree: Any) -> Any:
    if tree is None:
        return None
    if isinstance(tree, Leaf):
        return {"leaf": [tree.column, tree.pad, tree.is_lengths]}
    if isinstance(tree, dict):
        return {"dict": {key: _tree_words(part) for key, part in tree.items()}}
    return {"tuple": [_tree_words(part) for part in tree]}


def _tree_of(words: Any) -> Any:
    if words is None:
        return None
    if "leaf" in words:
        return Leaf(*words["leaf"])
    if "dict" in words:
        return {key: _tree_of(part) for key, part in words["dict"].items()}
    return tuple(_tree_of(part) for part in words["tuple"])
