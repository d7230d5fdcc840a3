"""What a worker and a parameter server on another rank send each other.

Words go through a channel of the two. Gradients and weights go through memory that both see where
they share a node, else behind the words.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch

from flatout.world import LostRank, Pair, meeting

# What a worker wants of a server, the first number of its message.
PUSH, TICK, PULL, CLAIM, CLOSE, REST, MEET, END = range(8)
# And of one that computes nothing: these weights are those of now; gradients, to be measured; make
# the step; gradients, and the step at once; tell or take states; tell how long an update takes.
VALUES, GRADIENTS, STEP, WHOLE_STEP, STATES, TAKE, TIMES = range(8, 15)
# The first rank wants something else.
CALL = 15


class Link:
    """One end of it.

    Attributes:
        up: where a gradient lies on its way to the server.
        down: where weights lie on their way back.
    """

    def __init__(
        self, pair: Pair, *, same_node: bool, words: int, length: int, dtype: torch.dtype
    ) -> None:
        self.pair, self._words = pair, words
        shared = _shared(pair, 2 * length * dtype.itemsize) if same_node else None
        self.is_shared = shared is not None
        both = torch.zeros(2 * length, dtype=dtype) if shared is None else shared.view(dtype)
        self.up, self.down = both[:length], both[length:]

    def send(self, words: torch.Tensor, data: torch.Tensor | None = None) -> None:
        """Send words, and what lies in `up` or `down`."""
        self.pair.send(words).wait()
        if data is not None and len(data) and not self.is_shared:
            self.pair.send(data).wait()

    def send_last(self, words: torch.Tensor, patience_s: float) -> None:
        """Send words to a server that may not listen any more."""
        self.pair.send(words).wait(timedelta(seconds=patience_s))

    def words(self, count: int, patience_s: float | None = None) -> list[float]:
        """Words that come."""
        told = torch.zeros(count, dtype=torch.float64)
        work = self.pair.receive(told)
        work.wait(*([] if patience_s is None else [timedelta(seconds=patience_s)]))
        result: list[float] = told.tolist()
        return result

    def data(self, into: torch.Tensor) -> None:
        """What comes behind the words, into `up` or `down`, or a part of it."""
        if len(into) and not self.is_shared:
            self.pair.receive(into).wait()


def _shared(pair: Pair, size: int) -> torch.Tensor | None:
    size = max(size, 1)
    file = os.memfd_create("flatout-server", os.MFD_CLOEXEC) if pair.own == 0 else -1
    try:
        if pair.own == 0:
            os.ftruncate(file, size)
        pid, fd, inode = pair.gather(_told(file))[0]
        try:
            there = meeting.opened(pid, fd, os.O_RDWR)
            is_same = os.fstat(there).st_ino == inode
        except OSError:
            there, is_same = -1, False
        could = all(pair.gather(is_same))
        result = torch.frombuffer(mmap.mmap(there, size), dtype=torch.uint8) if could else None
        if there >= 0:
            os.close(there)
        return result
    finally:
        if file >= 0:
            os.close(file)


def _told(file: int) -> list[int]:
    return [os.getpid(), file, os.fstat(file).st_ino] if file >= 0 else [0, 0, 0]


@contextmanager
def answering(who: str) -> Iterator[None]:
    """Within, a server is waited for: where it fails, that is told."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, LostRank):
            raise
        raise LostRank(f"{who} has ended or does not answer ({error})") from error
