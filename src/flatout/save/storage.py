"""Folders on a local disk or in an object store, in which a file is complete or absent.

On a local disk, a file is written under a temporary name, flushed to the disk and renamed; then the
folder is flushed. Object stores (s3, gs, abfs, memory, ...) have no rename, but show a file only
after its upload is complete. A group of files in such a store ends with a file that lists them.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from fsspec.spec import AbstractBufferedFile

from flatout import unfinished
from flatout.atomic_file import flush_folder
from flatout.errors import CheckpointError

Chunk = bytes | memoryview

# Bytes that are hashed and written at a time, so that they are still in the CPU cache.
_PIECE = 4 << 20


class Written(NamedTuple):
    size: int
    sha256: str


class Folder:
    """A folder, given by a path or by any URL that fsspec knows.

    Names of files are relative to the folder and may contain slashes. The first write creates the
    folder. Every failure raises a `CheckpointError` with the path and advice.

    Attributes:
        renames: whether a folder can be renamed in one step; True only on local disks.
    """

    def __init__(self, url: str | os.PathLike[str]) -> None:
        self.url = os.fspath(url)
        try:
            self._fs, self._root = url_to_fs(self.url)
        except (ImportError, ValueError) as error:
            raise CheckpointError(
                f"this kind of path cannot be opened: {error}",
                where=self.url,
                do="install the fsspec package of that store (s3fs, gcsfs, adlfs, ...)",
            ) from error
        self.renames = isinstance(self._fs, LocalFileSystem)

    def child(self, name: str) -> Folder:
        """Return the folder `name` inside this folder."""
        return self._at(self._path(name))

    def parent(self) -> tuple[Folder, str]:
        """Return the folder that contains this path, and the path's name in that folder."""
        root = self._root.rstrip("/")
        return self._at(self._fs._parent(root)), root.rpartition("/")[2]

    def where(self, name: str = "") -> str:
        """Return the path or URL of `name`, for messages."""
        path = self._path(name)
        return path if self.renames else str(self._fs.unstrip_protocol(path))

    def write_whole(self, name: str, chunks: Sequence[Chunk]) -> Written:
        """Write a file. At any moment, `name` is the old file or the complete new file."""
        if not self.renames:
            return self.write(name, chunks)
        target = Path(self._path(name))
        draft = name[: len(name) - len(target.name)] + unfinished.new_name()
        written = self.write(draft, chunks)
        try:
            with self._explained("write", name):
                os.replace(self._path(draft), target)
                flush_folder(target.parent)
        except BaseException:
            self._remove_quietly(draft)
            raise
        return written

    def write(self, name: str, chunks: Sequence[Chunk]) -> Written:
        """Write a new file and flush it to disk. An error removes it; a kill may leave a part."""
        needed = sum(len(chunk) for chunk in chunks)
        digest = hashlib.sha256()
        path = self._path(name)
        with self._explained("write", name, needed):
            try:
                fill = fill_local if self.renames else self._fill_store
                fill(path, _pieces(chunks, digest))
            except BaseException:
                if self.renames:
                    self._remove_quietly(name)
                raise
        return Written(needed, digest.hexdigest())

    def read(self, name: str) -> bytes:
        """Return the bytes of a file."""
        with self._explained("read", name):
            return bytes(self._fs.cat_file(self._path(name)))

    def open(self, name: str) -> Any:
        """Open a file for reading, as a context manager."""
        with self._explained("read", name):
            return self._fs.open(self._path(name), "rb")

    def list(self) -> list[str]:
        """Return the sorted names in the folder; an empty list if the folder does not exist."""
        with self._explained("list", ""):
            try:
                paths = self._fs.ls(self._root, detail=False)
            except (FileNotFoundError, NotADirectoryError):
                return []
        return sorted({path.rstrip("/").rpartition("/")[2] for path in paths})

    def exists(self, name: str = "") -> bool:
        """Return whether the file or folder exists."""
        with self._explained("read", name):
            return bool(self._fs.exists(self._path(name)))

    def is_folder(self, name: str = "") -> bool:
        """Return whether a folder of this name exists."""
        with self._explained("read", name):
            return bool(self._fs.isdir(self._path(name)))

    def size(self, name: str) -> int | None:
        """Return the size of a file in bytes, or None if the file does not exist."""
        with self._explained("read", name):
            try:
                return int(self._fs.info(self._path(name))["size"])
            except (FileNotFoundError, NotADirectoryError):
                return None

    def remove(self, name: str) -> None:
        """Remove a file, or a folder with its content, if it exists."""
        with self._explained("remove", name), suppress(FileNotFoundError):
            self._fs.rm(self._path(name), recursive=True)

    def rename_folder(self, old: str, new: str) -> bool:
        """Rename the folder `old` to `new` in one step; return False if `new` exists."""
        source, target = Path(self._path(old)), Path(self._path(new))
        with self._explained("rename", old):
            flush_folder(source)
            try:
                source.rename(target)
            except OSError as error:
                if error.errno in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
                    return False
                raise
            flush_folder(target.parent)
        return True

    def make_folder(self, name: str) -> bool:
        """Make an empty local folder; return False if the name exists."""
        path = Path(self._path(name))
        with self._explained("make", name):
            _make_folders(path.parent)
            try:
                path.mkdir()
            except FileExistsError:
                return False
        return True

    def remove_if_empty(self, name: str) -> None:
        """Remove a local folder if it is empty."""
        if self.renames:
            with suppress(OSError):
                os.rmdir(self._path(name))

    def remove_abandoned(self) -> None:
        """Remove unfinished files and folders of killed processes of this host."""
        for name in self.list():
            if unfinished.is_abandoned(name):
                self._remove_quietly(name)

    def _at(self, root: str) -> Folder:
        folder = Folder.__new__(Folder)
        folder._fs, folder._root, folder.renames = self._fs, root, self.renames
        folder.url = folder.where()
        return folder

    def _path(self, name: str) -> str:
        return f"{self._root.rstrip('/')}/{name}" if name else self._root

    def _remove_quietly(self, name: str) -> None:
        with suppress(CheckpointError):
            self.remove(name)

    def _fill_store(self, path: str, pieces: Iterator[Chunk]) -> None:
        file = self._create(path)
        try:
            for piece in pieces:
                file.write(piece)
            file.close()
        except BaseException:
            if isinstance(file, AbstractBufferedFile):
                # Closing a file would end its upload and show the file. Python closes files that it
                # collects, so discard the upload and mark the file as closed.
                file.discard()
                file.closed = True
            else:
                with suppress(Exception):
                    self._fs.rm_file(path)
            raise

    def _create(self, path: str) -> Any:
        try:
            return self._fs.open(path, "wb")
        except FileNotFoundError:  # sftp, hdfs, ... need the parent folder
            self._fs.makedirs(self._fs._parent(path), exist_ok=True)
            return self._fs.open(path, "wb")

    @contextmanager
    def _explained(self, verb: str, name: str, needed: int | None = None) -> Iterator[None]:
        self._fs.invalidate_cache()  # other processes write here too
        try:
            yield
        except CheckpointError:
            raise
        except OSError as error:
            raise self._error(verb, name, needed, error) from error
        except Exception as error:
            if self.renames:
                raise
            # Stores raise errors of their own types.
            raise self._error(verb, name, needed, error) from error

    def _error(self, verb: str, name: str, needed: int | None, error: Exception) -> CheckpointError:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        what = f"cannot {verb} it: {reason}"
        if needed is not None:
            what += f"; {needed:,} bytes needed"
            free = _free(self._root) if self.renames else None
            what += "" if free is None else f", {free:,} bytes free"
        number = error.errno if isinstance(error, OSError) else None
        return CheckpointError(what, where=self.where(name), do=_cure(number))


def fill_local(path: str, pieces: Iterator[Chunk]) -> None:
    _make_folders(Path(path).parent)
    with open(path, "wb") as file:
        for piece in pieces:
            file.write(piece)
        file.flush()
        os.fsync(file.fileno())


def _pieces(chunks: Sequence[Chunk], digest: Any) -> Iterator[Chunk]:
    for chunk in chunks:
        whole = memoryview(chunk)
        for start in range(0, len(whole), _PIECE):
            piece = whole[start : start + _PIECE]
            digest.update(piece)
            yield piece


def _make_folders(path: Path) -> None:
    missing = [place for place in (path, *path.parents) if not place.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for place in missing:
        flush_folder(place.parent)


def _free(path: str) -> int | None:
    for place in [Path(path), *Path(path).parents]:
        with suppress(OSError):
            return shutil.disk_usage(place).free
    return None


def _cure(number: int | None) -> str:
    if number in (errno.ENOSPC, errno.EDQUOT):
        return "free space there, keep fewer checkpoints (save.keep_last), or save elsewhere"
    if number == errno.EFBIG:
        return "raise the limit on file sizes (ulimit -f), or save elsewhere"
    if number in (errno.EACCES, errno.EPERM, errno.EROFS):
        return "choose a place that you may read and write"
    if number in (errno.ENOTDIR, errno.EEXIST, errno.EISDIR):
        return "choose another path: a file is where a folder should be, or the other way round"
    if number == errno.ENOENT:
        return "check the path"
    return "check the path, the rights and the connection"
