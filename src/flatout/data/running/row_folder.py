"""Rows of a RowStore in a folder: Flatout's own format, mapped into memory to be read.

    rows.bin         the rows, one after the other
    ragged-0.bin     values of the first ragged column, and so on
    meta.json        layout, number of rows, form, digest, checksums; written last

While a folder is being filled its name ends in `.part`, and `filled.log` holds which rows are on
the disk for good: each entry is written after their bytes were flushed, and carries their checksum.
A process that is killed loses what was not in the log yet, and nothing else.
"""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import shutil
import struct
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from flatout.data.block import Block, Numbers, Values
from flatout.data.form import Form, Leaf
from flatout.data.running.buffers import Buffers
from flatout.data.running.row_store import Arena, Field, Layout, RowStore
from flatout.errors import DataError
from flatout.kernels.example import crc32c

VERSION = 1
_ENTRY = struct.Struct("<II")
_PIECE = 64 << 20
# What may be lost to a kill: rows that came in this time.
_FLUSH_S = 5.0


class FileArena:
    """Values at the end of a file, mapped again when it has grown."""

    def __init__(self, path: Path, dtype: np.dtype[Any]) -> None:
        self._dtype = dtype
        self._file = open(path, "a+b", buffering=0)  # noqa: SIM115
        self._mapped = np.empty(0, dtype)
        self._end = os.fstat(self._file.fileno()).st_size // dtype.itemsize

    def append(self, values: npt.NDArray[Any]) -> int:
        """Keep values; returns where they begin."""
        start = self._end
        data = np.ascontiguousarray(values).data.cast("B")
        place = start * self._dtype.itemsize
        while data:
            written = os.pwrite(self._file.fileno(), data, place)
            data, place = data[written:], place + written
        self._end += len(values)
        return start

    def values(self) -> npt.NDArray[Any]:
        """All values so far."""
        mapped = self._mapped
        if len(mapped) < self._end:
            mapped = _mapped(self._file.fileno(), self._end * self._dtype.itemsize, self._dtype)
            self._mapped = mapped
        return mapped

    def flush(self) -> None:
        """Bring everything to the disk."""
        os.fsync(self._file.fileno())


class Filling:
    """A folder that is being filled, by this process alone.

    Attributes:
        store: the rows.
        filled: bool of shape (rows,): which are there.
        found: how many were there already, from a run before.
    """

    def __init__(self, target: Path, layout: Layout, rows: int, digest: str) -> None:
        self.target = target
        self.part = target.with_name(target.name + ".part")
        self.part.mkdir(parents=True, exist_ok=True)
        if not (self.part / "lock").exists() and any(self.part.iterdir()):
            raise DataError(
                "this folder is needed to write in, but holds files that Flatout has not made",
                where=str(self.part),
                do="move it elsewhere, or choose another target",
            )
        self._lock = open(self.part / "lock", "w")  # noqa: SIM115
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self.digest = digest
        begun = {"version": VERSION, "rows": rows, "digest": digest, **_layout_words(layout)}
        self._begin(begun)
        self._rows_file = open(self.part / "rows.bin", "r+b", buffering=0)  # noqa: SIM115
        # The rows are written through mapped memory, where a full disk kills the process: so their
        # place is taken now.
        os.posix_fallocate(self._rows_file.fileno(), 0, rows * layout.stride)
        mapped = mmap.mmap(self._rows_file.fileno(), rows * layout.stride)
        matrix = np.frombuffer(mapped, np.uint8).reshape(rows, layout.stride)
        self._mapped = mapped
        ragged = [field for field in layout.fields if field.ragged]
        self._arenas = [
            FileArena(self.part / f"ragged-{i}.bin", field.dtype) for i, field in enumerate(ragged)
        ]
        self.store = RowStore(layout, matrix, self._arenas)
        self.filled = np.zeros(rows, bool)
        self._log = open(self.part / "filled.log", "a+b", buffering=0)  # noqa: SIM115
        self._replay()
        self.found = int(self.filled.sum())
        self._pending: list[tuple[Numbers, int]] = []
        self._flushed = time.monotonic()

    def _begin(self, begun: dict[str, Any]) -> None:
        """Go on with what is there if it is of the same kind, or start anew."""
        with suppress(OSError, ValueError):
            if json.loads((self.part / "begun.json").read_text()) == begun:
                return
        for old in self.part.iterdir():
            if old.name != "lock":
                old.unlink()
        with open(self.part / "rows.bin", "wb") as file:
            file.truncate(begun["rows"] * begun["stride"])
        (self.part / "begun.json").write_text(json.dumps(begun))

    def _replay(self) -> None:
        """Take over the rows of the log whose bytes are what was written."""
        self._log.seek(0)
        content = self._log.read()
        at = 0
        while at + _ENTRY.size <= len(content):
            count, checksum = _ENTRY.unpack_from(content, at)
            end = at + _ENTRY.size + 8 * count
            if end > len(content):
                break
            slots = np.frombuffer(content, np.int64, count, at + _ENTRY.size)
            if not self._whole(slots, checksum):
                break
            self.filled[slots] = True
            at = end
        self._log.truncate(at)

    def _whole(self, slots: Numbers, checksum: int) -> bool:
        if len(slots) and not (int(slots.min()) >= 0 and int(slots.max()) < len(self.filled)):
            return False
        rows = self.store.rows[slots]
        ends = [len(arena.values()) for arena in self._arenas]
        for field, end in zip((f for f in self.store.layout.fields if f.ragged), ends, strict=True):
            places = rows[:, field.offset : field.offset + 16].copy().view(np.int64)
            if len(places) and int(places.sum(axis=1).max()) > end:
                return False
        return bool(crc32c(rows) == checksum)

    def put(self, slots: Numbers, columns: dict[str, Values]) -> None:
        """Keep rows; they are safe after the next `flush`."""
        packed = self.store.put(slots, columns)
        self._pending.append((slots.copy(), crc32c(packed)))
        self.filled[slots] = True
        if time.monotonic() - self._flushed > _FLUSH_S:
            self.flush()

    def flush(self) -> None:
        """Bring the rows to the disk, and then into the log."""
        pending, self._pending = self._pending, []
        if pending:
            self._mapped.flush()
            os.fsync(self._rows_file.fileno())
            for arena in self._arenas:
                arena.flush()
            entries = [_ENTRY.pack(len(s), checksum) + s.tobytes() for s, checksum in pending]
            self._log.write(b"".join(entries))
            os.fsync(self._log.fileno())
        self._flushed = time.monotonic()

    def finish(self, form: Form | None, extra: dict[str, Any]) -> Path:
        """Make the whole folder what its name promises; returns the folder."""
        self.flush()
        names = ["rows.bin", *(f"ragged-{i}.bin" for i in range(len(self._arenas)))]
        meta = {
            "version": VERSION,
            "rows": len(self.filled),
            "digest": self.digest,
            **_layout_words(self.store.layout),
            "form": None if form is None else [_tree_words(tree) for tree in form],
            "files": {name: _checksums(self.part / name) for name in names},
            **extra,
        }
        beside = self.part / "meta.json.part"
        with open(beside, "w") as file:
            json.dump(meta, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, self.part / "meta.json")
        if self.target.exists():  # another process was quicker
            shutil.rmtree(self.part)
            return self.target
        os.rename(self.part, self.target)
        _sync_folder(self.target.parent)
        # Only now: whoever is killed before goes on with them.
        for name in ("begun.json", "filled.log"):
            (self.target / name).unlink(missing_ok=True)
        return self.target

    def close(self) -> None:
        """Flush, and let others go on."""
        with suppress(OSError):
            self.flush()
        self._lock.close()


class RowFolder:
    """A whole folder, to be read.

    Attributes:
        meta: what its meta.json holds.
        rows: how many rows there are.
        form: where inputs, targets and weights are, or None where a schema tells.
        store: the rows.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.meta = read_meta(self.path)
        try:
            self._open()
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError, OSError) as error:
            if isinstance(error, DataError):
                raise
            raise DataError(
                f"the folder is damaged: {type(error).__name__}: {error}",
                where=str(self.path / "meta.json"),
                do="delete it and make it again",
            ) from error

    def _open(self) -> None:
        layout = _layout_of(self.meta)
        self.rows = int(self.meta["rows"])
        for name, found in self.meta["files"].items():
            size = _size(self.path / name)
            if size != found["size"]:
                raise DataError(
                    f"expected {found['size']:,} bytes, found {size:,}",
                    where=str(self.path / name),
                    do="the folder is damaged: delete it and make it again",
                )
        with open(self.path / "rows.bin", "rb") as file:
            mapped = _mapped(file.fileno(), self.rows * layout.stride, np.dtype(np.uint8))
        ragged = [field for field in layout.fields if field.ragged]
        arenas: list[Arena] = [
            _ReadArena(self.path / f"ragged-{i}.bin", field.dtype) for i, field in enumerate(ragged)
        ]
        self.store = RowStore(layout, mapped.reshape(self.rows, layout.stride), arenas)
        self._seen = {name: _state(self.path / name) for name in self.meta["files"]}
        self.store.check = self._check_unchanged
        form = self.meta["form"]
        self.form = None if form is None else Form(*(_tree_of(tree) for tree in form))

    def take(self, numbers: Numbers, buffers: Buffers) -> Block:
        """Rows by number."""
        return Block(self.store.get(numbers, buffers), numbers)

    def _check_unchanged(self) -> None:
        """Before mapped memory is touched: where its file has shrunk, the process would end."""
        for name, seen in self._seen.items():
            if _state(self.path / name) != seen:
                raise DataError(
                    "the file has changed while it was being read",
                    where=str(self.path / name),
                    do="delete the folder and make it again; nothing else may write to it",
                )

    def verify(self) -> None:
        """Compare all bytes with their checksums.

        Raises:
            DataError: naming the file and the first piece that differs.
        """
        for name, found in self.meta["files"].items():
            for at, checksum in enumerate(_checksums(self.path / name)["crc32c"]):
                if checksum != found["crc32c"][at]:
                    raise DataError(
                        "the bytes are not those that were written: the checksum differs",
                        where=f"{self.path / name}: bytes {at * _PIECE:,} and following",
                        do="delete the folder and make it again",
                    )


class _ReadArena:
    def __init__(self, path: Path, dtype: np.dtype[Any]) -> None:
        with open(path, "rb") as file:
            self._values = _mapped(file.fileno(), _size(path), dtype)

    def append(self, values: npt.NDArray[Any]) -> int:
        raise AssertionError("a whole folder is only read")

    def values(self) -> npt.NDArray[Any]:
        return self._values


def read_meta(path: Path) -> dict[str, Any]:
    """What a folder's meta.json holds.

    Raises:
        DataError: there is none, it is damaged, or of another version.
    """
    try:
        meta: dict[str, Any] = json.loads((path / "meta.json").read_text())
    except FileNotFoundError as error:
        raise DataError(
            "no row cache is here: meta.json is missing",
            where=str(path),
            do="make one with flatout data convert",
        ) from error
    except NotADirectoryError as error:
        raise DataError("expected a folder of rows, found a file", where=str(path)) from error
    except (OSError, ValueError) as error:
        raise DataError(f"meta.json cannot be read: {error}", where=str(path)) from error
    if not isinstance(meta, dict):
        raise DataError("meta.json is damaged: it holds no object", where=str(path))
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
    """Size, and when it was last written; of a file that has gone (-1, -1)."""
    try:
        found = os.stat(path)
    except OSError:
        return -1, -1
    return found.st_size, found.st_mtime_ns


def _sync_folder(folder: Path) -> None:
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror}", where=str(path)) from error


def _checksums(path: Path) -> dict[str, Any]:
    with open(path, "rb") as file:
        found = [crc32c(piece) for piece in iter(lambda: file.read(_PIECE), b"")]
    return {"size": _size(path), "crc32c": found}


def _layout_words(layout: Layout) -> dict[str, Any]:
    fields = [
        {**field._asdict(), "dtype": str(field.dtype), "shape": list(field.shape)}
        for field in layout.fields
    ]
    return {"stride": layout.stride, "fields": fields}


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
        return {"leaf": list(tree)}
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
