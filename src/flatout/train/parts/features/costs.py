"""Measured costs to compute, read and write the features of a sample."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from flatout.cache_folder import kind_folder
from flatout.data import Pipeline, Source, device_room, disk_room, memory_room
from flatout.measure import available_bytes, finish_device, usable_cpus

# Fraction of the free memory that the system is expected to use for cached files.
_SHARE = 0.5
_COPIED = 16 << 20
# Rate of reading rows, as a fraction of the rate of a copy, since rows are also checked and
# collected.
_READ = 0.25


_CPU = torch.device("cpu")


def timed(run: Callable[[], Any], device: torch.device = _CPU) -> tuple[float, Any]:
    """Return the seconds of a call, and its result.

    On a device other than the CPU it is the smallest of three times, after a first call that loads
    and chooses kernels.
    """
    calls = 1 if device.type == "cpu" else 4
    seconds = []
    for _ in range(calls):
        finish_device()
        began = time.perf_counter()
        given = run()
        finish_device()
        seconds.append(time.perf_counter() - began)
    return min(seconds[-3:]), given


class Costs(NamedTuple):
    """Seconds per sample.

    Attributes:
        made: seconds to read and decode a sample.
        prefix: seconds of the frozen layers before a cut.
        live: seconds of the layers after the cut, forward and backward.
        read: seconds to read a row, in place of making the sample and running the prefix.
        is_beside: whether samples are made, and rows read, while the device computes. Then only the
            longer of the two times counts.
    """

    made: float
    prefix: float
    live: float
    read: float
    is_beside: bool

    @property
    def plain_s(self) -> float:
        """Seconds per sample if nothing is kept."""
        computed = self.prefix + self.live
        return max(self.made, computed) if self.is_beside else self.made + computed

    @property
    def saved_s(self) -> float:
        """Seconds saved per kept row, before the cost of reading the row."""
        if self.is_beside:
            return max(0.0, self.plain_s - max(self.read, self.live))
        return self.made + self.prefix

    @property
    def read_s(self) -> float:
        """Seconds added per row that is read or written."""
        return 0.0 if self.is_beside else self.read


def is_made_beside(source: Source, device: torch.device) -> bool:
    """Return whether samples are made, and rows read, while the device computes."""
    return device.type != "cpu" and isinstance(source, Pipeline)


def making_s(source: Source) -> float:
    """Return the seconds in which all CPUs together make a sample."""
    began = time.perf_counter()
    first = source.peek(1)
    spent = (time.perf_counter() - began) / max(1, first[0].size if first else 1)
    return spent / usable_cpus()


def read_rate(where: str, size: int, device: torch.device = _CPU) -> float:
    """Return the bytes per second at which rows are read."""
    fits = device.type == "cuda" and size <= device_room(device)
    copied = torch.ones(_COPIED, dtype=torch.uint8, device=device if fits else _CPU)
    copied.clone()
    took, _ = timed(copied.clone, device if fits else _CPU)
    rate = _READ * _COPIED / max(took, 1e-9)
    if fits:
        return rate
    if where == "disk" and size > available_bytes() * _SHARE:
        rate = min(rate, disk_rate(bytes(_COPIED)))
    return rate


def disk_rate(data: bytes) -> float:
    """Return the bytes per second at which the cache folder's disk is read."""
    with tempfile.TemporaryFile(dir=kind_folder("features"), buffering=0) as file:
        file.write(data)
        os.fsync(file)
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        file.seek(0)
        began = time.perf_counter()
        file.read()
        return len(data) / max(time.perf_counter() - began, 1e-9)


def room(where: str) -> float:
    """Return the free bytes that a store of rows may use."""
    return float(memory_room() if where == "memory" else disk_room())
