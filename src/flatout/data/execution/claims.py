"""Parts of an epoch's batches that this rank has claimed. The first rank to ask gets a part."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from threading import Lock
from typing import NamedTuple

from flatout.data.execution.batch_sampler import BatchSampler


class NoneLeft(Exception):
    """All parts are claimed, so there are no more batches."""


class Claim(NamedTuple):
    """A part of a batch.

    Attributes:
        step: index of the batch in its epoch.
        part: index of the part in its batch; each batch has one part for each rank.
    """

    step: int
    part: int


class Claims:
    """The parts that this rank has claimed of some batches of an epoch, in the order of its claims.

    A part is claimed when its samples are about to be read, a few parts ahead of its step.

    Args:
        ask: claims the next part among all ranks, and returns its index and the number of parts
            left. If no part is left, it returns -1 and the index after the last part.
        use: is called with the index of the claim whose samples are used next.
        parts: number of parts of each batch.
        first: index, in the epoch, of the first of these batches.
        last: index, in the epoch, after the last of these batches.
        run: number of consecutive batches of which the same part is claimed together.

    Attributes:
        parts: number of parts of each batch.
        used: number of claims used so far.
        passed: number of parts that all ranks have claimed between this rank's last two used
            claims.
        end: index after the last batch with a claimed part; None before it is known.
    """

    def __init__(
        self,
        ask: Callable[[], tuple[int, int]],
        use: Callable[[int], None],
        parts: int,
        first: int,
        last: int,
        run: int = 1,
    ) -> None:
        self._ask, self._use = ask, use
        self.parts, self._first, self._last, self._run = parts, first, last, run
        self._found: list[tuple[int, Claim]] = []
        self._left = 0
        # Threads that make batches ask in any order; the lock makes claims in ascending order.
        self._lock = Lock()
        self.used = self.passed = 0
        self._latest = -1
        self.end: int | None = None

    def at(self, place: int) -> Claim | None:
        """Return this rank's claim at index `place`, or None if no more claims exist."""
        with self._lock:
            while len(self._found) <= place and self.end is None:
                self._claim()
            return self._found[place][1] if place < len(self._found) else None

    def _claim(self) -> None:
        number, self._left = self._ask()
        if number < 0:
            self.end = self._step(self._left // self.parts)
            return
        group, part = divmod(number, self.parts)
        steps = range(self._step(group), self._step(group + 1))
        self._found += [(number, Claim(step, part)) for step in steps]

    def _step(self, group: int) -> int:
        return min(self._first + group * self._run, self._last)

    def ahead(self) -> int:
        """Return how many claims to make ahead: few where few parts are left for other ranks."""
        return max(1, self._left // (2 * self.parts))

    def take(self) -> Claim:
        """Use the next claim."""
        number, claim = self._found[self.used]
        self.used += 1
        # A claim that another worker has given back may be before the latest one.
        self.passed = max(0, number - self._latest)
        self._latest = max(self._latest, number)
        self._use(number)
        return claim


def cuts_of(cut: BatchSampler, parts: int) -> list[BatchSampler]:
    return [replace(cut, rank=part, world_size=parts) for part in range(parts)]
