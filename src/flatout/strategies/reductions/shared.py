"""Sums over ranks of one node in shared memory.

Each rank sums its piece directly from the memory of all ranks, and copies the sums of other ranks.
This is reduce-scatter and all-gather (Patarasuk and Yuan, "Bandwidth Optimal All-reduce Algorithms
for Clusters of Workstations", 2009) without a message. Sockets would copy the same numbers several
more times.
"""

from __future__ import annotations

import mmap
import os
from typing import NamedTuple

import torch

from flatout.strategies.reductions.reduction import Flat, Reduction
from flatout.world import Barrier, Group, barrier, mailbox


class _BucketPlace(NamedTuple):
    """The memory of one bucket, as real numbers.

    Attributes:
        pieces: this rank's piece in the memory of each rank.
        sum: this rank's memory for the sum of its piece.
        copies: for each rank its piece in this rank's values, and the memory of that rank's sum.
    """

    pieces: list[torch.Tensor]
    sum: torch.Tensor
    copies: list[tuple[torch.Tensor, torch.Tensor]]


class Shared(Reduction):
    """Reads other ranks' gradients in their memory.

    A rank's values are read only until all ranks have summed their pieces, and each rank waits for
    that. Its sums are read until the reader begins the next sum. So two meetings are enough.

    Args:
        group: ranks of one node.
        meet: the barrier of these ranks.
    """

    is_exact = True

    def __init__(self, group: Group, meet: Barrier) -> None:
        self.group = group
        self._meet = meet
        self._laid: dict[int, _BucketPlace] = {}

    def memory(
        self, number: int, length: int, dtype: torch.dtype, device: torch.device | None = None
    ) -> torch.Tensor:
        """Return zeros in a file without a name, which the other ranks map too."""
        ranks, own, size = len(self.group.ranks), self.group.own, length * dtype.itemsize
        # The sums follow the values in memory, on their own page.
        whole = -(-max(1, size) // mmap.PAGESIZE) * mmap.PAGESIZE
        file = mailbox.memory_file(2 * whole)
        try:
            mapped = [
                torch.frombuffer(mailbox.map_file(pid, fd, 2 * whole), dtype=torch.uint8)
                for pid, fd in barrier.gathered(self.group, (os.getpid(), file))
            ]
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
        """Sum with two meetings."""
        laid = self._laid[flat.number]
        self._meet()
        add_in_order(laid.pieces, laid.sum)
        self._meet()
        for piece, item in laid.copies:
            piece.copy_(item)


def add_in_order(pieces: list[torch.Tensor], into: torch.Tensor) -> None:
    if pieces[0].itemsize >= 4:
        torch.add(pieces[0], pieces[1], out=into)
        for piece in pieces[2:]:
            into += piece
        return
    wide = pieces[0].float()
    for piece in pieces[1:]:
        wide += piece
    into.copy_(wide)
