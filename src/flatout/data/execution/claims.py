"""Parts of an epoch's batches that this rank has claimed: each is one rank's, who asks first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from threading import Lock
from typing import NamedTuple

from flatout.data.execution.batch_sampler import BatchSampler


class NoneLeft(Exception):
    """All parts are claimed: the batches end here."""


class Claim(NamedTuple):
    """A part of a batch.

    Attributes:
        step: number of the batch in its epoch.
        part: which of its parts, of which each batch has one for each rank.
    """

    step: int
    part: int


class Claims:
    """The parts that this rank has claimed of some batches of an epoch, in the order of its claims.

    They are claimed when their samples are to be read, a few ahead of their step.

    Args:
        ask: claims the next part of all ranks' and returns its number, and how many are left then;
            -1 where none is left, and before which number all has ended.
        use: gets the number of the claim whose samples are used next.
        parts: into how many each batch is cut.
        first: number of the first of these batches in the epoch.
        last: number after that of the last one.
        run: how many batches in a row are claimed together, the same part of each.

    Attributes:
        parts: as above.
        used: how many were used.
        passed: how many parts all ranks together have claimed from the one that this rank has used
            before up to the latest.
        end: number after that of the last batch that was handed out; None before that is known.
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
        # Threads that make batches ask, in any order; places are claimed in theirs.
        self._lock = Lock()
        self.used = self.passed = 0
        self._latest = -1
        self.end: int | None = None

    def at(self, place: int) -> Claim | None:
        """This rank's claim number `place`, from 0; None where so many are not to be had."""
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
        """How many claims ahead of the step are well spent: few where few are left for others."""
        return max(1, self._left // (2 * self.parts))

    def take(self) -> Claim:
        """The next claim is used."""
        number, claim = self._found[self.used]
        self.used += 1
        # One that another worker has given back may lie before the latest.
        self.passed = max(0, number - self._latest)
        self._latest = max(self._latest, number)
        self._use(number)
        return claim


def cuts_of(cut: BatchSampler, parts: int) -> list[BatchSampler]:
    """How an epoch is cut, for each part of its batches."""
    return [replace(cut, rank=part, world_size=parts) for part in range(parts)]
