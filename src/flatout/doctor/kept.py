"""Files that Flatout keeps in its cache folder, and which of them living processes use."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from flatout.cache_folder import MARK, cache_folder, is_made
from flatout.cache_folder import remove as remove_made
from flatout.doctor.trials import scratch
from flatout.unfinished import is_abandoned, is_unfinished

# Folders of the cache folder. The words describe what a user loses by removing a folder.
KINDS = {
    "auto": "measured settings of models",
    "looks": "which settings ended runs",
    "ranks": "measured numbers of ranks",
    "steps": "compiled steps and forwards",
    "index": "where rows begin in files",
    "files": "fetched files",
    "rows": "cached samples",
    "features": "what frozen layers gave",
    "live": "what jobs have shown",
    "trials": "trials that were killed",
    "edits": "the way back from flatout doctor --fix",
}
# Names of files of one process, which `flatout top` shows. The first group is the process ID.
_OF_PROCESS = re.compile(r"(\d+)(-[0-9a-f]{16})?(\.part|\.json)?")


@dataclass(frozen=True)
class KeptFile:
    """One file or folder in the cache folder.

    Attributes:
        kind: one of KINDS.
        path: path of the file or folder.
        bytes: bytes on the disk.
        is_used: True if a living process uses it.
    """

    kind: str
    path: Path
    bytes: int
    is_used: bool

    def as_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return {**asdict(self), "path": str(self.path)}


def kept() -> list[KeptFile]:
    """Return all files and folders in the order of KINDS, from folders that Flatout has marked."""
    base = cache_folder()
    used = _used(base)
    return [
        KeptFile(kind, path, _bytes(path), _is_used(kind, path, used))
        for kind in KINDS
        for path in _paths(base, kind)
    ]


def remove(some: Iterable[KeptFile]) -> list[KeptFile]:
    """Remove files, except those that a living process has begun to use since.

    Returns:
        The removed files.
    """
    used = _used(cache_folder())
    removed = []
    for item in some:
        if not _is_used(item.kind, item.path, used) and _removed(item):
            removed.append(item)
    return removed


def not_marked() -> list[Path]:
    """Return folders with names of KINDS that Flatout has not made, and hence never removes."""
    folders = [cache_folder() / kind for kind in KINDS]
    return [folder for folder in folders if os.path.lexists(folder) and not is_made(folder)]


def _removed(kept: KeptFile) -> bool:
    if kept.kind == "trials":
        scratch.remove(kept.path)
    else:
        remove_made(kept.path)
    return not os.path.lexists(kept.path)


def _paths(base: Path, kind: str) -> Iterator[Path]:
    if is_made(base / kind):
        yield from sorted(path for path in (base / kind).iterdir() if path.name != MARK)


def _is_used(kind: str, path: Path, used: set[str]) -> bool:
    if kind == "trials":
        return scratch.is_alive(path)
    if is_unfinished(path.name):
        return not is_abandoned(path.name)
    owner = _OF_PROCESS.fullmatch(path.name)
    if owner is not None and psutil.pid_exists(int(owner[1])):
        return True
    real = os.path.realpath(path)
    return any(item == real or item.startswith(real + os.sep) for item in used)


def _used(base: Path) -> set[str]:
    below = os.path.realpath(base) + os.sep
    result: set[str] = set()
    for pid in psutil.pids():
        process = Path("/proc") / str(pid)
        with suppress(OSError):
            result.add(os.readlink(process / "cwd"))
        with suppress(OSError):
            for descriptor in os.listdir(process / "fd"):
                with suppress(OSError):
                    result.add(os.readlink(process / "fd" / descriptor))
        with suppress(OSError):
            lines = (process / "maps").read_text(errors="surrogateescape").splitlines()
            result.update(line[line.index("/") :] for line in lines if "/" in line)
    return {item for item in result if item.startswith(below)}


def _bytes(path: Path) -> int:
    total = 0
    with suppress(OSError):
        total = path.lstat().st_blocks * 512
    if path.is_dir() and not path.is_symlink():
        for folder, folders, files in os.walk(path):
            for name in (*folders, *files):
                with suppress(OSError):
                    total += os.lstat(os.path.join(folder, name)).st_blocks * 512
    return total
