"""Messages between a worker and a parameter server.

Words are sent through a channel between the two. Gradients and weights pass through shared memory
if both are on one node, else they follow the words.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch

from flatout.world import LostRank, Pair, barrier

# The first number of a worker's message, its request. To a server that does not wait: PUSH a step,
# TICK a step without a gradient, PULL the weights, CLAIM a part of an epoch, CLOSE the epoch, REST:
# the worker has no step left, MEET: the same, and asks for the workers that have none left.
PUSH, TICK, PULL, CLAIM, CLOSE, REST, MEET = range(7)
# To a server that waits: GRADIENTS measures the sum of gradients, STEP makes the step, WHOLE_STEP
# does both at once.
GRADIENTS, STEP, WHOLE_STEP = range(7, 10)
# To each server: CALL calls a method, named by a value that follows; END ends the server.
CALL, END = 10, 11

HEAD = 6
"""Words of a message before rates and used parameters.

They are the kind, the optimizer's index, and up to four numbers.
"""


class Link:
    """One end of a connection between a worker and a server."""

    def __init__(
        self, pair: Pair, *, same_node: bool, words: int, length: int, dtype: torch.dtype
    ) -> None:
        self.pair, self._words = pair, words
        shared = _shared(pair, 2 * length * dtype.itemsize) if same_node else None
        self.is_shared = shared is not None
        both = torch.zeros(2 * length, dtype=dtype) if shared is None else shared.view(dtype)
        self.up, self.down = both[:length], both[length:]

    def send(self, words: torch.Tensor, data: torch.Tensor | None = None) -> None:
        self.pair.send(words).wait()
        if data is not None and len(data) and not self.is_shared:
            self.pair.send(data).wait()

    def send_last(self, words: torch.Tensor, patience_s: float) -> None:
        self.pair.send(words).wait(timedelta(seconds=patience_s))

    def words(self, count: int | None = None, patience_s: float | None = None) -> list[float]:
        words = torch.zeros(self._words if count is None else count, dtype=torch.float64)
        work = self.pair.receive(words)
        work.wait(*([] if patience_s is None else [timedelta(seconds=patience_s)]))
        result: list[float] = words.tolist()
        return result

    def data(self, into: torch.Tensor) -> None:
        if len(into) and not self.is_shared:
            self.pair.receive(into).wait()

    def message(
        self, kind: int, place: int = 0, numbers: list[float] | None = None, *more: float
    ) -> torch.Tensor:
        """Return the words of a message."""
        words = torch.zeros(self._words, dtype=torch.float64)
        head = [kind, place, *(numbers or [])]
        words[: len(head)] = torch.tensor(head, dtype=torch.float64)
        words[HEAD : HEAD + len(more)] = torch.tensor(more, dtype=torch.float64)
        return words

    def begin_call(self, name: str, *arguments: Any) -> None:
        """Ask the server to call a method; `end_call` gets its result."""
        self.send(self.message(CALL))
        self.pair.send_value([name, *arguments])

    def end_call(self) -> Any:
        return self.pair.receive_value()


def _shared(pair: Pair, size: int) -> torch.Tensor | None:
    size = max(size, 1)
    file = os.memfd_create("flatout-server", os.MFD_CLOEXEC) if pair.own == 0 else -1
    try:
        if pair.own == 0:
            os.ftruncate(file, size)
        pid, fd, inode = pair.gather(_offer(file))[0]
        try:
            there = barrier.opened(pid, fd, os.O_RDWR)
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


def _offer(file: int) -> list[int]:
    return [os.getpid(), file, os.fstat(file).st_ino] if file >= 0 else [0, 0, 0]


@contextmanager
def answering(who: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, LostRank):
            raise
        raise LostRank(f"{who} has ended or does not answer ({error})") from error
