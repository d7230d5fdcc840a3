"""Which files a source reads, for people who compare runs."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

# Of more files than these a run does not ask the file system again.
_MOST_ASKED = 10_000


@dataclass(frozen=True)
class FilesRead:
    """Files in figures.

    Attributes:
        bytes: in all; None where there are too many files to ask.
        newest: when the newest was last written, in Unix seconds; None likewise.
    """

    files: int
    bytes: int | None
    newest: float | None


def files_read(source: Any) -> FilesRead | None:
    """The files of a Pipeline, or of those that it mixes; None of data that come from none."""
    paths = list(dict.fromkeys(_paths(getattr(source, "origin", None))))
    if not paths:
        return None
    if len(paths) > _MOST_ASKED:
        return FilesRead(len(paths), None, None)
    sizes, times = [], []
    for path in paths:
        with suppress(OSError):  # it has gone
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
