"""Finds the files for a user's paths: globs, lists, URLs, compressed files.

A remote file is copied into a cache folder once, and so is a compressed file whose rows are found
by their position. A copy is complete or absent, and is made again when the original changes.
"""

from __future__ import annotations

import bz2
import codecs
import gzip
import hashlib
import lzma
import os
import shutil
import stat
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypeAlias

from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from flatout import unfinished
from flatout.cache_folder import cache_folder, kind_folder, private
from flatout.console import say_as_is
from flatout.errors import DataError
from flatout.words import counted, size_words

Paths: TypeAlias = "str | os.PathLike[str] | Sequence[str | os.PathLike[str]]"

# Bytes that are copied at a time.
_PIECE = 4 << 20
# Seconds between two progress lines of a copy.
_QUIET_S = 1.0
# Maximum number of bytes per compressed byte. Text and records have 3 to 20; more are mostly zeros,
# or made to fill a disk.
_MOST_RATIO = 200
# Bytes to which any compressed file may decompress.
_ALWAYS_UNPACKED = 256 << 20
_MAGIC = {
    b"\x1f\x8b": "gzip",
    b"BZh": "bzip2",
    b"\xfd7zXZ\x00": "xz",
    b"\x28\xb5\x2f\xfd": "zstandard",
}
# Number of first bytes of a file that show how the file is compressed.
_LONGEST_MAGIC = max(map(len, _MAGIC))


@dataclass(frozen=True)
class File:
    """A file of this machine.

    Attributes:
        path: path on this machine.
        name: name of the file as the user gave it, for messages.
        size: number of bytes.
        mtime_ns: time of the last write, when the file was found.
    """

    path: str
    name: str
    size: int
    mtime_ns: int

    def check_unchanged(self) -> None:
        """Raise an error if the file was replaced or deleted."""
        try:
            now = os.stat(self.path)
        except OSError as error:
            raise DataError(
                f"the file has gone while it was being read: {error.strerror}", where=self.name
            ) from error
        if (now.st_size, now.st_mtime_ns) != (self.size, self.mtime_ns):
            raise DataError(
                f"the file has changed while it was being read: it had {self.size:,} bytes, now "
                f"{now.st_size:,}",
                where=self.name,
                do="open it again once it is complete; nothing may write to it while it is read",
            )


def stamps_of(paths: Iterable[str]) -> str:
    """Return 64 hex digits that differ if a file was written or replaced, even with the same times.

    A deleted file counts as a change.
    """
    digest = hashlib.sha256()
    for path in paths:
        digest.update(f"{stamp_of(path)}\n".encode())
    return digest.hexdigest()


def stamp_of(path: str) -> str:
    """Return a text that differs if a file was written or replaced, even with the same times."""
    try:
        stat = os.stat(path)
    except OSError:
        return "gone"
    # A program may set the time of the last write, but not that of the last change (ctime).
    return f"{stat.st_size} {stat.st_mtime_ns} {stat.st_ctime_ns} {stat.st_ino}"


def find(
    paths: Paths,
    *,
    unpack: bool = True,
    most: int | None = None,
) -> list[File]:
    """Find the files that `paths` names, as files of this machine."""
    if not isinstance(paths, (str, os.PathLike, Iterable)):
        raise DataError(f"expected a path or a list of paths, found {type(paths).__name__}")
    given = [paths] if isinstance(paths, (str, os.PathLike)) else list(paths)
    if not given:
        raise DataError("expected at least one path, found an empty list")
    for path in given:
        if not isinstance(path, (str, os.PathLike)) or not os.fspath(path):
            raise DataError(f"expected a path, found {path!r}")
        if os.fspath(path) == "-":
            raise DataError(
                "'-' is standard input, which is read once and has no row numbers",
                do="read it with flatout.data.fifo('-', ...), or write it into a file first",
            )
    return [
        _here(fs, place, name, unpack, most)
        for path in given
        for fs, place, name in _places(os.fspath(path))
    ]


def _places(path: str) -> Iterator[tuple[Any, str, str]]:
    try:
        fs, place = url_to_fs(os.path.expanduser(path))
        is_local = isinstance(fs, LocalFileSystem)
        if any(sign in path for sign in "*?[") and not fs.exists(place):
            paths = sorted(p for p in fs.glob(place) if not fs.isdir(p))
            problem = f"no file matches the pattern {path!r}"
        elif fs.isdir(place):
            inside = fs.ls(place, detail=True)
            hidden = (".", "_")
            paths = sorted(
                entry["name"]
                for entry in inside
                if entry["type"] == "file" and not Path(entry["name"]).name.startswith(hidden)
            )
            problem = f"the folder {path!r} holds no files"
        else:
            paths = [place] if fs.exists(place) else []
            problem = f"there is no file {path!r}"
    except (ImportError, ValueError) as error:
        raise DataError(
            f"this kind of path cannot be opened: {error}",
            where=path,
            do="install the fsspec package of that store (s3fs, gcsfs, adlfs, ...)",
        ) from error
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror or error}", where=path) from error
    if not paths:
        raise DataError(problem, do="check the path; a relative one starts at " + os.getcwd())
    is_absolute = os.path.isabs(os.path.expanduser(path))
    for file in paths:
        name = _name_of(file, is_absolute=is_absolute) if is_local else fs.unstrip_protocol(file)
        yield fs, file, name


def _name_of(path: str, *, is_absolute: bool) -> str:
    # Messages name a file as the user did: an absolute path stays absolute.
    relative = os.path.relpath(path)
    return path if is_absolute or relative.startswith("..") else relative


def unpack(paths: Paths, *, most: int) -> list[str]:
    """Decompress files that hold far more than expected from their size, so that they can be read.

    The files are decompressed into the cache, where readers of the same paths find them.

    Args:
        paths: path, glob pattern or URL, or a list of these.
        most: maximum number of bytes of each decompressed file.

    Returns:
        paths of the decompressed files.

    Raises:
        DataError: see `find`; or a file holds more than `most` bytes.
    """
    return [file.path for file in find(paths, most=most)]


def most_unpacked(packed: int) -> int:
    return max(_ALWAYS_UNPACKED, _MOST_RATIO * packed)


def _here(fs: Any, place: str, name: str, unpack: bool, most: int | None) -> File:
    with _reading(name):
        if isinstance(fs, LocalFileSystem):
            status = os.stat(place)
            if not stat.S_ISREG(status.st_mode):
                raise _no_file(name, status.st_mode)
            packed = _packing(place) if unpack else None
            if packed is None:
                return File(place, name, status.st_size, status.st_mtime_ns)
            known = f"{place} {status.st_size} {status.st_mtime_ns} unpacked"
            return _cached(known, name, lambda: open(place, "rb"), status.st_size, unpack, most)
        info = fs.info(place)
        size = info.get("size")
        # Stores give a version under one of these keys. Size alone would miss a rewritten file.
        version = [str(info.get(k)) for k in ("ETag", "etag", "md5Hash", "mtime", "LastModified")]
        known = f"{name} {size} {version} {unpack}"
        return _cached(known, name, lambda: fs.open(place, "rb"), size, unpack, most)


def _no_file(name: str, mode: int) -> DataError:
    if stat.S_ISFIFO(mode):
        return DataError(
            "expected a file, found a pipe, which is read once and has no row numbers",
            where=name,
            do="read it with flatout.data.fifo(path, ...), or write it into a file first",
        )
    kind = "a socket" if stat.S_ISSOCK(mode) else "a device"
    return DataError(f"expected a file, found {kind}", where=name, do="name a file")


def _packing(path: str) -> str | None:
    with open(path, "rb") as file:
        return _packing_of(file.read(_LONGEST_MAGIC))


def _packing_of(begin: bytes) -> str | None:
    return next((kind for magic, kind in _MAGIC.items() if begin.startswith(magic)), None)


def in_utf8(file: File, encoding: str) -> File:
    """Return a text file as UTF-8: the file itself, or a copy in the cache, which is made once."""
    try:
        name = codecs.lookup(encoding).name
        "".encode(name)  # zlib and similar codecs make no text
    except (LookupError, TypeError, ValueError) as error:
        raise DataError(
            f"encoding: expected one that Python knows, found {encoding!r}",
            do="such as 'utf-8', 'cp1252' (Windows, western Europe), 'latin-1' or 'utf-16'",
        ) from error
    if name in ("utf-8", "utf-8-sig", "ascii"):
        return file
    with _reading(file.name):
        known = f"{file.path} {file.size} {file.mtime_ns} {name} as utf-8"
        return _cached(known, file.name, lambda: _InUtf8(file, name), file.size, False, None)


class _InUtf8:
    """Reads a text file of another encoding as UTF-8."""

    def __init__(self, file: File, encoding: str) -> None:
        self._file, self._encoding = file, encoding
        self._decoder = codecs.getincrementaldecoder(encoding)()
        self._bytes = self._lines = 0

    def __enter__(self) -> _InUtf8:
        self._opened = open(self._file.path, "rb")
        return self

    def __exit__(self, *error: object) -> None:
        self._opened.close()

    def read(self, size: int) -> bytes:
        while piece := self._opened.read(size):
            if text := self._decoded(piece, final=False):
                return text.encode()
        return self._decoded(b"", final=True).encode()

    def _decoded(self, piece: bytes, final: bool) -> str:
        before = self._bytes - len(self._decoder.getstate()[0])
        try:
            text = self._decoder.decode(piece, final)
        except UnicodeDecodeError as error:
            good = error.object[: error.start].decode(self._encoding, "ignore")
            line, byte = self._lines + good.count("\n") + 1, before + error.start
            bad_bytes = error.object[error.start : error.end].hex(" ")
            raise DataError(
                f"expected text in {self._encoding}, found the bytes {bad_bytes} ({error.reason})",
                where=f"{self._file.name}:{line} (byte {byte:,})",
                do="name the encoding that the file is written in: encoding=",
            ) from error
        self._bytes += len(piece)
        self._lines += text.count("\n")
        return text


def _cached(
    known: str,
    name: str,
    open_original: Callable[[], Any],
    size: int | None,
    unpack: bool,
    most: int | None,
) -> File:
    digest = hashlib.sha256(known.encode()).hexdigest()[:24]
    target = cache_folder() / "files" / f"{digest}-{Path(name).name}"
    kind_folder("files")
    if not target.exists():
        room = shutil.disk_usage(target.parent).free
        if size is not None and size > room:
            raise DataError(
                f"a copy needs {size:,} bytes, but {room:,} are free in {target.parent}",
                where=name,
                do="make room for a copy on this machine, or set FLATOUT_CACHE elsewhere",
            )
        if most is None:
            most = None if size is None else most_unpacked(size)
        _copy(name, open_original, target, unpack, most)
    status = target.stat()
    return File(str(target), name, status.st_size, status.st_mtime_ns)


def _copy(
    name: str,
    open_original: Callable[[], Any],
    target: Path,
    unpack: bool,
    most: int | None,
) -> None:
    # Several processes may copy the same file at once: each writes its own copy, and one copy is
    # kept.
    beside = target.with_name(unfinished.new_name())
    done, reported = 0, time.monotonic()
    try:
        with open_original() as original, open(beside, "wb", opener=private) as copy:
            content = _unpacked(original, name) if unpack else original
            while piece := content.read(_PIECE):
                done += len(piece)
                if most is not None and content is not original and done > most:
                    raise DataError(
                        f"the file unpacks to more than {most:,} bytes, which is the ceiling",
                        where=name,
                        do="if it is no mistake, unpack it by hand, or once by "
                        f"flatout.data.unpack({name!r}, most=BYTES)",
                    )
                copy.write(piece)
                if time.monotonic() - reported > _QUIET_S:
                    reported = time.monotonic()
                    say_as_is(f"bringing {name} into the cache: {size_words(done)}")
            copy.flush()
            os.fsync(copy.fileno())
        _name_it(beside, target)
    except EOFError as error:
        raise DataError(
            f"the packed file ends early: {done:,} bytes could be unpacked", where=name
        ) from error
    finally:
        with suppress(OSError):
            beside.unlink()


def _name_it(beside: Path, target: Path) -> None:
    """Give a copy its final name, unless another process was first; then that copy is used."""
    try:
        os.link(beside, target)
    except FileExistsError:
        pass
    except OSError:  # the file system has no hard links
        os.replace(beside, target)


def _unpacked(original: IO[bytes], name: str) -> IO[bytes]:
    begin = original.read(_LONGEST_MAGIC)
    original.seek(0)
    kind = _packing_of(begin)
    if kind == "gzip":
        return gzip.GzipFile(fileobj=original)  # type: ignore[return-value]
    if kind == "bzip2":
        return bz2.open(original)
    if kind == "xz":
        return lzma.open(original)
    if kind == "zstandard":
        try:
            import zstandard
        except ImportError as error:
            raise DataError(
                "the file is packed by zstandard", where=name, do="pip install zstandard"
            ) from error
        return _Zstandard(original, zstandard)  # type: ignore[return-value]
    return original


class _Zstandard:
    """Reads frames of zstandard, and detects a truncated frame, which the library does not."""

    def __init__(self, packed: IO[bytes], zstandard: Any) -> None:
        self._packed, self._zstandard = packed, zstandard
        self._frame: Any = None

    def read(self, size: int) -> bytes:
        while True:
            begin = b"" if self._frame is None else self._frame.unused_data
            if self._frame is not None and self._frame.eof:
                self._frame = None
            piece = begin or self._packed.read(size)
            if not piece:
                if self._frame is not None:
                    raise EOFError
                return b""
            if self._frame is None:
                self._frame = self._zstandard.ZstdDecompressor().decompressobj()
            try:
                unpacked: bytes = self._frame.decompress(piece)
            except self._zstandard.ZstdError as error:
                raise OSError(f"the packed bytes are damaged: {error}") from error
            if unpacked:
                return unpacked


def files_words(files: Sequence[File], kind: str, rows: int) -> str:
    """Return a text such as "2 LibSVM files, 0.9 MB, 8,124 rows"."""
    size = size_words(sum(file.size for file in files))
    return f"{counted(len(files), f'{kind} file')}, {size}, {rows:,} rows"


@contextmanager
def _reading(name: str) -> Iterator[None]:
    try:
        yield
    except DataError:
        raise
    except (OSError, lzma.LZMAError, zlib.error) as error:
        words = getattr(error, "strerror", None) or str(error)
        raise DataError(f"the file cannot be read or copied: {words}", where=name) from error
