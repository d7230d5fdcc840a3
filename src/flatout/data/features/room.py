"""Free memory and disk space that features may use."""

from __future__ import annotations

import os

import torch

from flatout.cache_folder import cache_folder
from flatout.measure import available_bytes, available_on_gpu

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
