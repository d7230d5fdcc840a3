"""Files of a store, on disk or in shared memory, and the room that is free for them."""

from __future__ import annotations

import fcntl
import json
import os
import tempfile
from contextlib import suppress
from pathlib import Path

import torch

from flatout.cache_folder import cache_folder, kind_folder, private, remove
from flatout.data.features.row_log import Files
from flatout.measure import available_bytes, available_on_gpu
from flatout.processes import state_and_start

# Fraction of the free memory that a store may use, if the user sets no budget.
_SHARE = 0.5
DEVICE_SHARE = 0.4
"""Fraction of a device's free memory that features may use, since a step may need more later."""
# _MEMORY_RESERVE: bytes of memory that stay free. _DISK_RESERVE: bytes of the disk that stay free,
# but at most 1/_DISK_PART of the disk.
_MEMORY_RESERVE = 512 << 20
_DISK_RESERVE, _DISK_PART = 1 << 30, 20


def memory_room(share: float = _SHARE) -> int:
    """Return the bytes of memory that features may use."""
    free = available_bytes()
    return max(0, min(int(free * share), free - _MEMORY_RESERVE))


def disk_room() -> int:
    """Return the bytes that this user may still write to the disk of the cache folder."""
    place = cache_folder()
    while not place.exists() and place != place.parent:
        place = place.parent
    result = os.statvfs(place)
    whole = result.f_blocks * result.f_frsize
    reserve = min(_DISK_RESERVE, whole // _DISK_PART)
    return max(0, result.f_bavail * result.f_frsize - reserve)


def device_room(device: torch.device, share: float = DEVICE_SHARE) -> int:
    """Return the bytes of a device's memory that features may use."""
    if device.type != "cuda":
        return memory_room(share)
    return int(available_on_gpu(device) * share)


# Kind of these files, which is part of their paths.
KIND = "features"


def disk_files(name: str) -> Files:
    folder = kind_folder(KIND) / name
    folder.mkdir(mode=0o700, exist_ok=True)
    log = _opened(folder / "filled.log")
    try:
        return Files(_opened(folder / "rows"), log, on_disk=True)
    except OSError:
        os.close(log)
        raise


def has_rows(name: str) -> bool:
    with suppress(OSError):
        return (kind_folder(KIND) / name / "filled.log").stat().st_size > 0
    return False


def remove_rows(name: str) -> None:
    """Remove a store; processes that have it open keep their rows."""
    remove(cache_folder() / KIND / name)


def memory_files(name: str) -> Files:
    """Open the files that a living process of this user made under this name, or create them.

    If the cache folder cannot be written, only this process has the files.
    """
    try:
        number = _opened(kind_folder(KIND) / f"{name}.memory")
    except OSError:
        return Files(_memory(), _memory(), on_disk=False)
    with open(number, "r+") as owner:
        fcntl.flock(owner, fcntl.LOCK_EX)
        files = _adopted(owner.read())
        if files is None:
            files = Files(_memory(), _memory(), on_disk=False)
            owner.seek(0)
            owner.truncate()
            owner.write(_words(files))
        return files


def _words(files: Files) -> str:
    pid = os.getpid()
    numbers = [[number, os.fstat(number).st_ino] for number in (files.rows, files.log)]
    return json.dumps({"pid": pid, "start": state_and_start(pid), "files": numbers})


def _adopted(words: str) -> Files | None:
    opened: list[int] = []
    with suppress(OSError, ValueError, TypeError, KeyError):
        data = json.loads(words)
        now = state_and_start(data["pid"])
        if now is None or now[1] != data["start"][1]:
            return None
        for number, inode in data["files"]:
            opened.append(os.open(f"/proc/{data['pid']}/fd/{number}", os.O_RDWR | os.O_CLOEXEC))
            if os.fstat(opened[-1]).st_ino != inode:
                raise ValueError
        rows, log = opened
        return Files(rows, log, on_disk=False)
    for item in opened:
        os.close(item)
    return None


def _opened(path: Path) -> int:
    return private(str(path), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW)


def _memory() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("flatout-features", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
