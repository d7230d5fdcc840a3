"""A barrier of the ranks of one node: no rank continues before all have come.

Each pair of ranks has two pipes. A byte through a pipe takes a few microseconds, and a closed pipe
shows that its rank has ended.
"""

from __future__ import annotations

import os
import select
from io import FileIO
from typing import Any, NamedTuple

from flatout.world import messages


class Group(NamedTuple):
    """Ranks with their own channel, on which only their own operations are in order.

    Attributes:
        ranks: numbers in the World.
        own: index of this rank in `ranks`, from 0.
        channel: torch's process group.
    """

    ranks: tuple[int, ...]
    own: int
    channel: Any


class Barrier:
    """The pipes of one rank.

    Args:
        to: by rank, the pipes that this rank writes.
        of: by rank, the pipes that this rank reads.
    """

    def __init__(self, to: dict[int, FileIO], of: dict[int, FileIO], timeout_s: float) -> None:
        self._to, self._of = to, of
        self._timeout_ms = timeout_s * 1e3
        self._polls = {rank: select.poll() for rank in of}
        for rank, poll in self._polls.items():
            poll.register(of[rank], select.POLLIN)

    def __call__(self) -> None:
        """Wait for all ranks.

        Raises:
            RuntimeError: a rank has ended, or has not come in time.
        """
        for rank, pipe in self._to.items():
            try:
                pipe.write(b"!")
            except BrokenPipeError as error:
                raise RuntimeError(f"rank {rank} has closed its pipe") from error
        for rank, poll in self._polls.items():
            if not poll.poll(self._timeout_ms):
                raise RuntimeError(f"rank {rank} has not come for {self._timeout_ms / 1e3:g} s")
            if not self._of[rank].read(1):
                raise RuntimeError(f"rank {rank} has closed its pipe")


def barrier_of(group: Group, timeout_s: float) -> Barrier | None:
    """Return the barrier of a group's ranks, which all call this; None if files are out of reach.

    Files are out of reach in containers that share a host, but not their processes.
    """
    others = [rank for rank in group.ranks if rank != group.ranks[group.own]]
    ends = {rank: os.pipe2(os.O_CLOEXEC) for rank in others}
    of = {rank: FileIO(read, "rb") for rank, (read, _) in ends.items()}
    writing = {rank: FileIO(write, "wb") for rank, (_, write) in ends.items()}
    offered = {
        rank: (os.getpid(), pipe.fileno(), os.fstat(pipe.fileno()).st_ino)
        for rank, pipe in writing.items()
    }
    result = gathered(group, offered)
    to: dict[int, FileIO] = {}
    own = group.ranks[group.own]
    for rank, there in zip(group.ranks, result, strict=True):
        if rank == own:
            continue
        pid, fd, inode = there[own]
        try:
            pipe = FileIO(opened(pid, fd, os.O_WRONLY), "wb")
        except OSError:
            break
        # Processes of two containers may have the same numbers. Then this is the rank's own pipe.
        if os.fstat(pipe.fileno()).st_ino != inode:
            pipe.close()
            break
        to[rank] = pipe
    all_could = all(gathered(group, len(to) == len(others)))
    # Only the ends that other ranks have opened stay, so that a pipe ends with its rank.
    for pipe in writing.values():
        pipe.close()
    if all_could:
        return Barrier(to, of, timeout_s)
    for pipe in (*to.values(), *of.values()):
        pipe.close()
    return None


def gathered(group: Group, value: Any) -> list[Any]:
    return messages.gather(value, len(group.ranks), group.channel)


def opened(pid: int, fd: int, flags: int) -> int:
    return os.open(f"/proc/{pid}/fd/{fd}", flags | os.O_CLOEXEC)
