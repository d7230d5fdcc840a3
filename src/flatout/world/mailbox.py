"""Exchange of bytes between the ranks of one node in shared memory.

Each rank writes into its own box, all meet, and each reads its bytes from the boxes of the others.
Each rank uses two boxes in turn. Before a rank writes into one of them again, it has met all others
after they have read it.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
from collections.abc import Sequence
from typing import NamedTuple

import torch

from flatout.world.barrier import Barrier, Group, barrier_of, gathered, opened
from flatout.world.messages import to_eight

_WORD = 8
# Fewest bytes of a box. A box that is too small becomes at least twice as large.
_LEAST_BYTES = 1 << 20
_TOLD = 4  # integers of a rank's two boxes that say where they are now


class _Box(NamedTuple):
    """The file and the memory of a rank's box."""

    file: int
    memory: mmap.mmap
    bytes: torch.Tensor
    address: int


class Mailbox:
    """The boxes of one rank."""

    def __init__(self, group: Group, meet: Barrier) -> None:
        self._own, self._meet, self._turn = group.own, meet, 0
        self._least = _LEAST_BYTES
        file = memory_file(mmap.PAGESIZE)
        try:
            there = gathered(group, (os.getpid(), file))
            self._pids = [pid for pid, _ in there]
            # By rank, the file and the length of each of its boxes.
            pages = [_mapped(pid, theirs, mmap.PAGESIZE) for pid, theirs in there]
            self._told = [page.bytes.view(torch.int64)[:_TOLD] for page in pages]
            self._meet()
        finally:
            os.close(file)
        self._boxes: list[dict[int, _Box]] = [{}, {}]

    def exchange(
        self, note: Sequence[int], parts: Sequence[Sequence[torch.Tensor]]
    ) -> tuple[list[list[int]], list[torch.Tensor]]:
        """Exchange notes and tensors like `World.exchange`."""
        ranks = len(parts)
        lengths = [sum([to_eight(tensor.nbytes) for tensor in part]) for part in parts]
        at = (1 + len(note) + 2 * ranks) * _WORD
        starts = []
        for length in lengths:
            starts.append(at)
            at += length
        box = self._begin(at)
        head = (len(note), *note, *starts, *lengths)
        struct.pack_into(f"{len(head)}q", box.memory, 0, *head)
        for start, part in zip(starts, parts, strict=True):
            _write(box, start, part)
        self._meet()
        notes, result = [], []
        for rank in range(ranks):
            theirs = self._of(rank)
            (count,) = struct.unpack_from("q", theirs.memory)
            numbers = struct.unpack_from(f"{count + 2 * ranks}q", theirs.memory, _WORD)
            start, length = numbers[count + self._own], numbers[count + ranks + self._own]
            notes.append(list(numbers[:count]))
            result.append(theirs.bytes[start : start + length])
        return notes, result

    def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return every rank's tensor, by rank, all of one form; valid until the next call."""
        _write(self._begin(tensor.nbytes), 0, [tensor])
        whole = [item[: tensor.nbytes] for item in self.meet()]
        return [item.view(tensor.dtype).view(tensor.shape) for item in whole]

    def reserve(self, length: int) -> int:
        """Give boxes that are made from now on room for at least `length` bytes.

        Returns:
            bytes of this rank's two boxes, as long as no more is sent at once.
        """
        self._least = max(self._least, length)
        return 2 * _in_pages(self._least)

    @property
    def nbytes(self) -> int:
        """The bytes of this rank's two boxes."""
        return sum(len(boxes[self._own].bytes) for boxes in self._boxes if self._own in boxes)

    def room(self, length: int) -> torch.Tensor:
        """Return this rank's next box, to be filled before `meet`: uint8 of shape (length,)."""
        return self._begin(length).bytes[:length]

    def meet(self) -> list[torch.Tensor]:
        """Wait for all, and return each rank's box, which may be longer than its content.

        The boxes are valid until the next call of a method here.
        """
        self._meet()
        return [self._of(rank).bytes for rank in range(len(self._pids))]

    def close(self) -> None:
        """Close the files, so that other ranks can open nothing here any more."""
        for boxes in self._boxes:
            own = boxes.pop(self._own, None)
            if own is not None:
                os.close(own.file)

    def _begin(self, length: int) -> _Box:
        self._turn ^= 1
        boxes = self._boxes[self._turn]
        own = boxes.get(self._own)
        if own is None or len(own.bytes) < length:
            had = 0 if own is None else len(own.bytes)
            wanted = max(self._least, 2 * had, length)
            size = _in_pages(wanted)
            if own is not None:
                os.close(own.file)  # all others have met this rank since they opened it
            file = memory_file(size)
            own = boxes[self._own] = _mapped(os.getpid(), file, size)
            header = self._told[self._own]
            header[2 * self._turn] = file
            header[2 * self._turn + 1] = size
        return own

    def _of(self, rank: int) -> _Box:
        boxes = self._boxes[self._turn]
        if rank == self._own:
            return boxes[rank]
        file, size = self._told[rank][2 * self._turn : 2 * self._turn + 2].tolist()
        known = boxes.get(rank)
        if known is None or (known.file, len(known.bytes)) != (file, size):
            try:
                known = boxes[rank] = _mapped(self._pids[rank], file, size)
            except OSError as error:
                raise RuntimeError(f"rank {rank} has ended") from error
        return known


def mailbox_of(group: Group, timeout_s: float) -> Mailbox | None:
    """Return the mailbox of a group's ranks, which all call this; None if they share no memory."""
    meet = barrier_of(group, timeout_s)
    return None if meet is None else Mailbox(group, meet)


def _write(box: _Box, at: int, tensors: Sequence[torch.Tensor]) -> None:
    for tensor in tensors:
        whole = tensor.contiguous()
        ctypes.memmove(box.address + at, whole.data_ptr(), tensor.nbytes)
        end, at = at + tensor.nbytes, at + to_eight(tensor.nbytes)
        if end < at:
            ctypes.memset(box.address + end, 0, at - end)


def _in_pages(size: int) -> int:
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE


def memory_file(size: int) -> int:
    """Return a new file in memory, without a name, for `map_file` in other processes."""
    file = os.memfd_create("flatout-memory", os.MFD_CLOEXEC)
    os.ftruncate(file, size)
    return file


def map_file(pid: int, file: int, size: int) -> mmap.mmap:
    """Return the memory of a file that a process of this node has open."""
    there = opened(pid, file, os.O_RDWR)
    try:
        return mmap.mmap(there, size)
    finally:
        os.close(there)


def _mapped(pid: int, file: int, size: int) -> _Box:
    memory = map_file(pid, file, size)
    result = torch.frombuffer(memory, dtype=torch.uint8)
    return _Box(file, memory, result, result.data_ptr())
