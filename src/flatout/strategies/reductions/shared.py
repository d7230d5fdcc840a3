"""Ranks of one node add up in memory that all of them see.

Each rank adds up its piece of what all have, straight from where they have it, and copies the
others' sums: reduce-scatter and all-gather (Patarasuk and Yuan, "Bandwidth Optimal All-reduce
Algorithms for Clusters of Workstations", 2009) without a message. Through sockets the same numbers
are copied several times more.
"""

from __future__ import annotations

import mmap
import os
from typing import NamedTuple

import torch

from flatout.strategies.reductions.meeting import Meeting, gathered, opened
from flatout.strategies.reductions.reduction import Flat, Reduction
from flatout.world import Group


class _Part(NamedTuple):
    """One rank's memory, as bytes.

    Attributes:
        values: what it has.
        sums: where it puts what it has added up: as long, of which it uses its own piece.
    """

    values: torch.Tensor
    sums: torch.Tensor


class Shared(Reduction):
    """Reads the others' gradients in their memory.

    A rank's values are read only until all ranks have added up their pieces, which each waits for.
    Its sums are read until the reader comes to the next addition. So two meetings are enough.

    Args:
        group: ranks of one node.
        meet: their meeting.
    """

    is_exact = True

    def __init__(self, group: Group, meet: Meeting) -> None:
        self.group = group
        self._meet = meet
        self._parts: dict[int, list[_Part]] = {}

    def memory(
        self, number: int, length: int, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Zeros in a file without a name, which the other ranks map too."""
        size = max(1, length * dtype.itemsize)
        own = os.memfd_create("flatout-gradients", os.MFD_CLOEXEC)
        try:
            # Sums begin on a page of their own.
            whole = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
            os.ftruncate(own, 2 * whole)
            parts = []
            for pid, fd in gathered(self.group, (os.getpid(), own)):
                there = opened(pid, fd, os.O_RDWR)
                mapped = torch.frombuffer(mmap.mmap(there, 2 * whole), dtype=torch.uint8)
                os.close(there)
                parts.append(_Part(mapped[:size], mapped[whole:][:size]))
            self._meet()
        finally:
            os.close(own)
        self._parts[number] = parts
        return parts[self.group.own].values[: length * dtype.itemsize].view(dtype)

    def add_up(self, flat: Flat) -> None:
        """In two meetings."""
        values, size, own = flat.values, len(self.group.ranks), self.group.own
        parts = self._parts[flat.number]

        def piece(memory: torch.Tensor, of: int) -> torch.Tensor:
            length = values.numel() * values.itemsize
            return memory[:length].view(values.dtype).tensor_split(size)[of]

        self._meet()
        _sum([piece(part.values, own) for part in parts], piece(parts[own].sums, own))
        self._meet()
        for rank, part in enumerate(parts):
            piece(parts[own].values, rank).copy_(piece(part.sums, rank))


def _sum(pieces: list[torch.Tensor], into: torch.Tensor) -> None:
    """In the order of ranks, with one rounding where numbers are short."""
    if pieces[0].itemsize >= 4:
        torch.add(pieces[0], pieces[1], out=into)
        for piece in pieces[2:]:
            into += piece
        return
    wide = pieces[0].float()
    for piece in pieces[1:]:
        wide += piece
    into.copy_(wide)
