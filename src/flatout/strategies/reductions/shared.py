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

from flatout.strategies.reductions.reduction import Flat, Reduction
from flatout.world import Barrier, Group, barrier


class _BucketPlace(NamedTuple):
    """The memory of one bucket, as real numbers.

    Attributes:
        pieces: this rank's piece of what each rank has.
        sum: where this rank puts what it has added up.
        copies: for each rank its piece here, and where that rank's sum of it is.
    """

    pieces: list[torch.Tensor]
    sum: torch.Tensor
    copies: list[tuple[torch.Tensor, torch.Tensor]]


class Shared(Reduction):
    """Reads the others' gradients in their memory.

    A rank's values are read only until all ranks have added up their pieces, which each waits for.
    Its sums are read until the reader comes to the next addition. So two meetings are enough.

    Args:
        group: ranks of one node.
        meet: their barrier.
    """

    is_exact = True

    def __init__(self, group: Group, meet: Barrier) -> None:
        self.group = group
        self._meet = meet
        self._laid: dict[int, _BucketPlace] = {}

    def memory(
        self, number: int, length: int, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Zeros in a file without a name, which the other ranks map too."""
        ranks, own, size = len(self.group.ranks), self.group.own, length * dtype.itemsize
        # Behind the values lie the sums, on their own page.
        whole = -(-max(1, size) // mmap.PAGESIZE) * mmap.PAGESIZE
        file = os.memfd_create("flatout-gradients", os.MFD_CLOEXEC)
        try:
            os.ftruncate(file, 2 * whole)
            mapped = []
            for pid, fd in barrier.gathered(self.group, (os.getpid(), file)):
                there = barrier.opened(pid, fd, os.O_RDWR)
                mapped.append(torch.frombuffer(mmap.mmap(there, 2 * whole), dtype=torch.uint8))
                os.close(there)
            self._meet()
        finally:
            os.close(file)
        real = dtype.to_real()
        values = [item[:size].view(real).tensor_split(ranks) for item in mapped]
        sums = [item[whole:][:size].view(real).tensor_split(ranks) for item in mapped]
        self._laid[number] = _BucketPlace(
            [pieces[own] for pieces in values],
            sums[own][own],
            [(values[own][rank], sums[rank][rank]) for rank in range(ranks)],
        )
        return mapped[own][:size].view(dtype)

    def add_up(self, flat: Flat) -> None:
        """Add up in two meetings."""
        laid = self._laid[flat.number]
        self._meet()
        add_in_order(laid.pieces, laid.sum)
        self._meet()
        for piece, item in laid.copies:
            piece.copy_(item)


def add_in_order(pieces: list[torch.Tensor], into: torch.Tensor) -> None:
    """Add up in the order of ranks, with one rounding where numbers are short."""
    if pieces[0].itemsize >= 4:
        torch.add(pieces[0], pieces[1], out=into)
        for piece in pieces[2:]:
            into += piece
        return
    wide = pieces[0].float()
    for piece in pieces[1:]:
        wide += piece
    into.copy_(wide)
