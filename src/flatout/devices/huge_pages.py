"""Tensors on pages of 2 MB, where rows that lie far apart are found sooner.

A CPU keeps the places of some thousand pages. Of a table on pages of 4 KB these are some MB: nearly
each row that a batch uses is on a page whose place has to be looked up in memory first.
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
# Fewer bytes than these lie on pages whose places a CPU keeps.
_LEAST = 64 * 2**20
# To move what is there takes a copy; what is made now may as well lie on them.
_LEAST_FRESH = 8 * 2**20

# Where each tensor lay when it was put there: it may have been given other memory since.
_there: Any = WeakTensorKeyDictionary()


def empty(shape: torch.Size) -> torch.Tensor:
    """As torch.empty, of float32: on huge pages where it is large and the system has them."""
    fresh = torch.empty(shape)
    if fresh.nbytes >= _LEAST_FRESH and _advise(fresh):
        _there[fresh] = fresh.data_ptr()
    return fresh


def move(values: torch.Tensor) -> None:
    """Give a tensor memory of huge pages, with the same values, as `Module.to` gives it another.

    Left as it is: one that is small, lies there already, whose memory something else refers to (a
    view, another process), or for which there is no room twice.
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
