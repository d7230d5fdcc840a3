"""Counts of the files that a source reads, to compare runs."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

# Maximum number of files whose sizes and times are read.
_MOST_ASKED = 10_000


@dataclass(frozen=True)
class FilesRead:
    """Counts of files.

    Attributes:
        files: number of files.
        bytes: bytes of all files; None if there are too many files to read their sizes.
        newest: time of the last write to any file, in Unix seconds; None as for `bytes`.
    """

    files: int
    bytes: int | None
    newest: float | None


def files_read(source: Any) -> FilesRead | None:
    """Count the files of a Pipeline, or of the pipelines that it mixes; None without files."""
    paths = list(dict.fromkeys(_paths(getattr(source, "origin", None))))
    if not paths:
        return None
    if len(paths) > _MOST_ASKED:
        return FilesRead(len(paths), None, None)
    sizes, times = [], []
    for path in paths:
        with suppress(OSError):  # the file was deleted
            stat = os.stat(path)
            sizes.append(stat.st_size)
            times.append(stat.st_mtime)
    return FilesRead(len(paths), sum(sizes), max(times, default=None))


def _paths(origin: Any) -> list[str]:
    parts = getattr(origin, "parts", None)
    if parts is not None:
        return [path for part in parts for path in _paths(getattr(part, "origin", None))]
    paths = getattr(origin, "paths", None)
    if paths is None:
        paths = [file.path for file in getattr(origin, "files", ())]
    return [os.fspath(path) for path in paths]
