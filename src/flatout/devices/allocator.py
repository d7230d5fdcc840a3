"""A setting of glibc's allocator that keeps the memory that a step frees for the next step.

By default glibc maps large blocks and unmaps them when freed, and returns the top of its heap to
the system. The kernel then clears and maps every page again in every step. These page faults can
cost a CPU job a third of its time. The parameters are those of mallopt(3).
"""

from __future__ import annotations

import ctypes
import os
import sys
from functools import cache
from typing import Literal

# Parameter numbers of mallopt, from malloc.h.
_M_TRIM_THRESHOLD = -1
_M_TOP_PAD = -2
_M_MMAP_THRESHOLD = -3

_KEEP = {
    "MALLOC_MMAP_THRESHOLD_": 2**30,  # only blocks of 1 GiB and more are mapped on their own
    "MALLOC_TRIM_THRESHOLD_": 2**40,  # the heap's top is never returned
    "MALLOC_TOP_PAD_": 64 * 2**20,  # the heap grows in large strides
}

# The largest mmap threshold that glibc before 2.35 takes.
_OLD_LARGEST_MMAP_THRESHOLD = 32 * 2**20

_LIBC = b"libc.so.6"

_set_here: Literal["keep", "default"] | None = None


@cache
def supported() -> bool:
    """Return whether glibc's allocator serves this process; other allocators also have mallopt."""
    if not sys.platform.startswith("linux"):
        return False
    info, whole = _SymbolInfo(), ctypes.CDLL(None)
    symbol = getattr(whole, "malloc_usable_size", None)
    if symbol is None:
        return False
    found = whole.dladdr(ctypes.cast(symbol, ctypes.c_void_p), ctypes.byref(info))
    return bool(found and info.file and os.path.basename(info.file) == _LIBC)


class _SymbolInfo(ctypes.Structure):
    """Dl_info of dladdr(3): the library of a symbol."""

    _fields_ = (
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    )


def keep_memory() -> bool:
    global _set_here
    if not supported():
        return False
    # A trim threshold of -1 means "never".
    if not _set(_M_MMAP_THRESHOLD, _KEEP["MALLOC_MMAP_THRESHOLD_"]):
        _set(_M_MMAP_THRESHOLD, _OLD_LARGEST_MMAP_THRESHOLD)
    _set(_M_TRIM_THRESHOLD, -1)
    _set(_M_TOP_PAD, _KEEP["MALLOC_TOP_PAD_"])
    _set_here = "keep"
    return True


def default_memory() -> bool:
    """Make the allocator return freed memory, as glibc does, and return whether that is possible.

    While a process runs, glibc raises its thresholds to the largest block freed so far, until a
    threshold is first set. The limits are 32 MiB, and twice that for the heap's top. glibc cannot
    restart this adaptation. So these limits are set: a job compared against this is compared
    against glibc at its best. Free memory is returned to the system at once.
    """
    global _set_here
    if not supported():
        return False
    _set(_M_MMAP_THRESHOLD, 32 * 2**20)
    _set(_M_TRIM_THRESHOLD, 64 * 2**20)
    _set(_M_TOP_PAD, 128 * 2**10)
    ctypes.CDLL(None).malloc_trim(ctypes.c_size_t(0))
    _set_here = "default"
    return True


def _set(parameter: int, value: int) -> bool:
    return bool(ctypes.CDLL(None).mallopt(ctypes.c_int(parameter), ctypes.c_int(value)) == 1)


def environment() -> dict[str, str]:
    """Return the variables that make a process keep its memory, or none if that is not supported.

    Set before Python starts, they also apply to memory that is allocated while torch loads.
    """
    return {name: str(value) for name, value in _KEEP.items()} if supported() else {}


def current() -> Literal["keep", "default"]:
    if _set_here is not None:
        return _set_here
    kept = environment()
    inherited = all(os.environ.get(name) == value for name, value in kept.items())
    return "keep" if kept and inherited else "default"
