"""The memory: free, allowed by the cgroup, and shared by loader workers."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from flatout.measure import available_bytes, cgroup_memory_limit

# A batch of 256 images of 3x224x224 in fp32 is 147 MiB, and a loader with two workers keeps four
# of them in shared memory. Containers get 64 MiB unless they ask for more.
SHM_FOR_WORKERS = 2**30


@dataclass(frozen=True)
class Memory:
    available: int
    total: int
    limit: int | None


@dataclass(frozen=True)
class Shm:
    total: int
    free: int
    too_small_for_workers: bool


def read_memory(root: Path = Path("/")) -> Memory:
    import psutil

    return Memory(
        available=available_bytes(root),
        total=int(psutil.virtual_memory().total),
        limit=cgroup_memory_limit(root),
    )


def read_shm(folder: Path = Path("/dev/shm")) -> Shm | None:
    """Return the size and use of the shared memory folder, or None if there is none."""
    try:
        stat = os.statvfs(folder)
    except OSError:
        return None
    total, free = stat.f_blocks * stat.f_frsize, stat.f_bavail * stat.f_frsize
    return Shm(total=total, free=free, too_small_for_workers=free < SHM_FOR_WORKERS)
