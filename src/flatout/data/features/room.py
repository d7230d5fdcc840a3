"""What is really free for features."""

from __future__ import annotations

import os

import torch

from flatout.cache_folder import cache_folder
from flatout.measure import available_bytes, available_on_gpu

# Of the free memory, what a store may take where no one said how much.
_SHARE = 0.5
DEVICE_SHARE = 0.4
"""Of the memory that is free on a device, what features may take: what a step needs may grow."""
# What stays free for others; of a small disk, a part of it.
_MEMORY_RESERVE = 512 << 20
_DISK_RESERVE, _DISK_PART = 1 << 30, 20


def memory_room(share: float = _SHARE) -> int:
    """Bytes of memory that features may take."""
    free = available_bytes()
    return max(0, min(int(free * share), free - _MEMORY_RESERVE))


def disk_room() -> int:
    """Bytes that this user may still write where the cache folder is, or will be."""
    place = cache_folder()
    while not place.exists() and place != place.parent:
        place = place.parent
    result = os.statvfs(place)
    whole = result.f_blocks * result.f_frsize
    reserve = min(_DISK_RESERVE, whole // _DISK_PART)
    return max(0, result.f_bavail * result.f_frsize - reserve)


def device_room(device: torch.device, share: float = DEVICE_SHARE) -> int:
    """Bytes of a device's memory that features may take."""
    if device.type != "cuda":
        return memory_room(share)
    return int(available_on_gpu(device) * share)
