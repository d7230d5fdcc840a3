"""Tensors on pages of 2 MB, which make access to distant rows faster.

A CPU caches the addresses of some thousand pages. With pages of 4 KB these cover only some MB of a
table. Then nearly each row that a batch uses is on a page whose address must first be read from
memory.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from flatout.measure import available_bytes

_PAGE = 2 * 2**20
_MADV_HUGEPAGE = 14  # from linux/mman.h
# Fewest bytes that are moved. A CPU caches the addresses of the pages of smaller tensors.
_LEAST = 64 * 2**20
# Fewest bytes of a new tensor that uses huge pages. It needs no copy, so the limit is lower.
_LEAST_FRESH = 8 * 2**20

# The address of each tensor when it was moved: it may have got other memory since.
_there: Any = WeakTensorKeyDictionary()


def empty(shape: torch.Size) -> torch.Tensor:
    """Return an uninitialized float32 tensor, on huge pages if it is large and they exist."""
    fresh = torch.empty(shape)
    if fresh.nbytes >= _LEAST_FRESH and _advise(fresh):
        _there[fresh] = fresh.data_ptr()
    return fresh


def move(values: torch.Tensor) -> None:
    """Move a tensor with its values to huge pages, as `Module.to` moves it to other memory.

    It is not moved if it is small, or on huge pages already, or if there is no room for a copy. It
    is not moved either if a view or another process refers to its memory.
    """
    if values.nbytes < _LEAST or _there.get(values) == values.data_ptr():
        return
    if not _is_alone(values) or available_bytes() < 2 * values.nbytes:
        return
    with torch.no_grad():
        fresh = torch.empty(values.shape, dtype=values.dtype)
        if not _advise(fresh):
            return
        fresh.copy_(values)
        values.data = fresh
    _there[values] = values.data_ptr()


def _is_alone(values: torch.Tensor) -> bool:
    storage = values.untyped_storage()
    users = torch._C._storage_Use_Count(storage._cdata)
    # The tensor, and `storage` itself.
    return users <= 2 and storage.nbytes() == values.nbytes and not storage.is_shared()


def _advise(fresh: torch.Tensor) -> bool:
    if not sys.platform.startswith("linux"):
        return False
    first = -(-fresh.data_ptr() // _PAGE) * _PAGE
    count = (fresh.data_ptr() + fresh.nbytes - first) // _PAGE
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return bool(madvise(first, count * _PAGE, _MADV_HUGEPAGE) == 0)
