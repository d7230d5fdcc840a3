"""What it costs to compute, read and write what may be kept of a sample: measured."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch

from flatout.cache_folder import cache_folder, kind_folder
from flatout.data import Source
from flatout.measure import available_bytes, finish_device, usable_cpus

# Of the free memory, what a store may take; as the store itself has it.
_SHARE = 0.5
_COPIED = 16 << 20
# A row is also compared with its checksum, and gathered: it is read at this share of a copy's rate.
_READ = 0.25


def timed(run: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds of a call, and what it gave."""
    finish_device()
    began = time.perf_counter()
    given = run()
    finish_device()
    return time.perf_counter() - began, given


def making_s(source: Source, device: torch.device) -> float:
    """Seconds by which making a sample delays its step."""
    began = time.perf_counter()
    first = source.peek(1)
    spent = (time.perf_counter() - began) / max(1, first[0].size if first else 1)
    return spent / usable_cpus() if device.type == "cpu" else 0.0


def read_rate(where: str, size: int) -> float:
    """Bytes a second at which rows are read.

    Args:
        where: they are.
        size: bytes of all of them: what the system keeps of files in memory is read from there.
    """
    copied = torch.ones(_COPIED, dtype=torch.uint8)
    copied.clone()
    took, _ = timed(copied.clone)
    rate = _READ * _COPIED / max(took, 1e-9)
    if where == "disk" and size > available_bytes() * _SHARE:
        rate = min(rate, disk_rate(bytes(_COPIED)))
    return rate


def disk_rate(data: bytes) -> float:
    """Bytes a second at which the cache folder's disk is read."""
    with tempfile.TemporaryFile(dir=kind_folder("features"), buffering=0) as file:
        file.write(data)
        os.fsync(file)
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        file.seek(0)
        began = time.perf_counter()
        file.read()
        return len(data) / max(time.perf_counter() - began, 1e-9)


def room(where: str) -> float:
    """Bytes that a store may take."""
    if where == "memory":
        return available_bytes() * _SHARE
    folders = (cache_folder(), *cache_folder().parents)
    return float(shutil.disk_usage(next(folder for folder in folders if folder.exists())).free)
