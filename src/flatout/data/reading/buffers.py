"""A pool of arrays to reuse when nothing refers to them, as new memory costs page faults."""

from __future__ import annotations

import math
import sys
from threading import Lock
from typing import Any

import numpy as np
import numpy.typing as npt

# Bytes below which malloc uses its free lists, so that reuse saves nothing.
_SMALLEST = 1 << 16
# Python without the global lock counts some references elsewhere, so a count of 0 proves nothing.
_COUNTS = getattr(sys, "_is_gil_enabled", lambda: True)()


def _references_when_idle() -> int:
    arrays = [np.empty(1)]
    for array in arrays:
        return sys.getrefcount(array)
    raise AssertionError


# Value of sys.getrefcount for an array that only the pool refers to.
_IDLE = _references_when_idle()


class Buffers:
    """A pool of arrays. A tensor or view of an array keeps the array in use.

    Args:
        limit: maximum number of bytes of unused arrays.
    """

    def __init__(self, limit: int = 1 << 29) -> None:
        self._limit = limit
        self._held = 0
        self._arrays: list[npt.NDArray[np.uint8]] = []
        self._lock = Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {"_limit": self._limit}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["_limit"])  # type: ignore[misc]

    def empty(self, shape: int | tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """Return an array with arbitrary contents, like `numpy.empty`.

        It stays valid while the array, a view or a tensor of it exists.
        """
        shape = (shape,) if isinstance(shape, int) else shape
        kind = np.dtype(dtype)
        size = math.prod(shape) * kind.itemsize
        if size < _SMALLEST or not _COUNTS:
            return np.empty(shape, kind)
        return self._memory(size)[:size].view(kind).reshape(shape)

    def _memory(self, size: int) -> npt.NDArray[np.uint8]:
        with self._lock:
            for array in self._arrays:
                if size <= array.nbytes <= 2 * size and sys.getrefcount(array) <= _IDLE:
                    return array
            # A quarter more than needed, so that ragged batches of similar size fit as well.
            array = np.empty(size + size // 4, np.uint8)
            self._held += array.nbytes
            self._arrays.append(array)
            while self._held > self._limit and len(self._arrays) > 1:
                self._held -= self._arrays.pop(0).nbytes
            return array
