"""Checksums of a user's files, beside them in FILE.seal, and compared as the files are read."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from flatout import cache_folder, unfinished
from flatout.atomic_file import atomic_write
from flatout.data import checksums
from flatout.data.checksums import Checksums, Verified, reader
from flatout.errors import DataError

SUFFIX = ".seal"
_VERSION = 1


class Seals:
    """The seals of some files, as far as they have one. Another process finds them by itself."""

    def __init__(self, files: Sequence[Any]) -> None:
        self._files = list(files)
        seals = {file.path: _verified(file) for file in self._files}
        self._found = {path: seal for path, seal in seals.items() if seal is not None}

    def __getstate__(self) -> dict[str, Any]:
        return {"files": self._files, "shared": checksums.shared() if self._found else None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if state["shared"] is not None:
            checksums.adopt(state["shared"])
        self.__init__(state["files"])  # type: ignore[misc]

    def of(self, file: Any) -> Verified | None:
        """What compares a file; None where there is nothing to compare, or no more."""
        seal = self._found.get(file.path)
        return None if seal is None or seal.done else seal

    def check_beside(
        self, file: Any, used: Iterable[tuple[int, int]], read: Callable[[int, int], Any]
    ) -> None:
        """Compare a file but for some ranges, which are compared when they are read."""
        verified = self.of(file)
        if verified is None:
            return
        starts, at = [], 0
        for start, stop in [*sorted(used), (file.size, file.size)]:
            if start > at:
                starts.append((at, start))
            at = max(at, stop)
        if starts:
            ranges = np.array(starts, np.int64)
            verified.check(ranges[:, 0], ranges[:, 1], read)


class Sealed(NamedTuple):
    """A file whose checksums were written.

    Attributes:
        file: its name.
        bytes: of it.
        seal: where the checksums are.
    """

    file: str
    bytes: int
    seal: str


def check_begins(files: Sequence[Any], size: int) -> None:
    """Compare the first bytes of files, from which it is learned how the rest is read."""
    seals = Seals(files)
    for file in files:
        with open(file.path, "rb") as opened:
            seals.check_beside(file, [(min(size, file.size), file.size)], reader(opened.fileno()))


def write_seal(path: str, name: str, *, private: bool = False) -> Sealed:
    """Write the checksums of a file beside it, whole or not at all."""
    before = os.stat(path)
    sums = Checksums.of(path)
    after = os.stat(path)
    if (before.st_mtime_ns, before.st_size) != (after.st_mtime_ns, sums.size):
        raise DataError("the file has changed while it was sealed", where=name, do="seal it again")
    words = {"version": _VERSION, "written_ns": after.st_mtime_ns, **sums.words()}
    unfinished.remove_abandoned(Path(path).parent)
    opener = cache_folder.private if private else None
    with atomic_write(path + SUFFIX, durable=True, opener=opener) as file:
        file.write(checksums.sealed(words))
    return Sealed(name, sums.size, name + SUFFIX)


def has_seal(path: str) -> bool:
    """Whether there are checksums beside a file."""
    return os.path.isfile(path + SUFFIX)


def _verified(file: Any) -> Verified | None:
    if not has_seal(file.path):
        return None
    where, again = file.name + SUFFIX, f"flatout data seal {file.name}"
    # What is packed or lies elsewhere is read from a copy.
    is_copy = os.path.dirname(file.path) == str(cache_folder.cache_folder() / "files")
    copied = f"delete the copy, and it is made again: {file.path}" if is_copy else None
    try:
        with open(file.path + SUFFIX) as opened:
            words = checksums.unsealed(opened.read())
        if "checksum" not in words or words["version"] != _VERSION:
            raise ValueError(f"it is no seal of version {_VERSION}")
        sums, written_ns = Checksums.from_words(words), int(words["written_ns"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"the seal cannot be read: {error}",
            where=where,
            do=copied or f"delete it, or make another one if the file is good: {again}",
        ) from error
    if sums.size != file.size:
        raise DataError(
            f"the file has changed since it was sealed ({_when(written_ns)}): it had "
            f"{sums.size:,} bytes, now {file.size:,}",
            where=file.name,
            do=copied or f"if that was meant: {again}; if not, bring the file back",
        )
    do = f"the file is damaged: bring it back from where it came, or, if it is good, {again}"
    if file.mtime_ns > written_ns:
        do = (
            f"the file was written after it was sealed ({_when(written_ns)}): if that was meant, "
            f"{again}; if not, bring it back"
        )
    return Verified(file.name, sums, (file.path, file.size, file.mtime_ns), copied or do)


def _when(ns: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(ns / 1e9))


def mapped_reader(content: Any) -> Callable[[int, int], npt.NDArray[np.uint8]]:
    """Gives bytes of mapped memory from one place to another."""
    whole = np.frombuffer(content, np.uint8)
    return lambda start, stop: whole[start:stop]
