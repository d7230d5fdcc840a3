"""Rows in memory that several processes share, however they were started."""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping
from typing import Any
from weakref import finalize

import numpy as np
import numpy.typing as npt

from flatout.data.block import Numbers, Values
from flatout.data.execution.row_store import Layout, RowStore


class SharedRows(RowStore):
    """Rows in an anonymous file; only those that were put take memory.

    Args:
        layout: of the rows, without ragged fields.
        count: slots 0 to count - 1 can be put.
        owner: process and file descriptor of the one that has made it; None makes it.
    """

    def __init__(self, layout: Layout, count: int, owner: tuple[int, int] | None = None) -> None:
        size = count * (layout.stride + 1)
        if owner is None:
            file = os.memfd_create("flatout-rows", os.MFD_CLOEXEC)
            os.ftruncate(file, size)
            owner = (os.getpid(), file)
        else:
            file = os.open(f"/proc/{owner[0]}/fd/{owner[1]}", os.O_RDWR | os.O_CLOEXEC)
        finalize(self, os.close, file)
        memory = np.frombuffer(mmap.mmap(file, size), np.uint8)
        rows, self._there = np.split(memory, [count * layout.stride])
        super().__init__(layout, rows.reshape(count, layout.stride), ())
        self._owner = owner

    def __reduce__(self) -> Any:
        return SharedRows, (self.layout, len(self.rows), self._owner)

    def has(self, slots: Numbers) -> npt.NDArray[np.bool_]:
        """Which of these rows were put, by any process; other numbers than slots were not."""
        are_slots = (slots >= 0) & (slots < len(self.rows))
        there: npt.NDArray[np.bool_] = self._there[np.where(are_slots, slots, 0)] == 1
        return are_slots & there

    def put(self, slots: Numbers, columns: Mapping[str, Values]) -> npt.NDArray[np.uint8]:
        """Keep rows; returns them as they are kept, uint8 of shape (rows, stride)."""
        packed = super().put(slots, columns)
        self._there[slots] = 1
        return packed
