"""shuffle: use a new order every epoch."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from flatout.data.execution.batch_sampler import Order
from flatout.data.randomness import order as drawn
from flatout.data.reading.block import Block, Numbers, cut, join, take
from flatout.data.reading.origins import Stream
from flatout.data.stages.stage import P, Plan, Stage, Writable
from flatout.errors import DataError


@dataclass(frozen=True)
class Shuffle(Stage):
    """A new order every epoch; with `window`, only among neighboring rows."""

    seed: int
    window: int | None = None

    once: ClassVar[bool] = True
    reorders = True

    def check_mixed(self) -> None:
        if self.window is not None:
            raise DataError(
                "shuffle(window=...) comes after mix", do="shuffle each source before mix"
            )

    def check_stream(self, stream: Stream, stages: Sequence[Stage]) -> None:
        if self.window is None:
            raise DataError(
                "a stream can be shuffled only among rows that are near each other",
                do="use shuffle(seed, window=10_000), or convert the data to files",
            )

    def turn(self, stages: Sequence[Stage]) -> int:
        return 1

    def order(self, order: Order, plan: Plan) -> Order:
        plan.runs.append(self.name)
        if self.window is None:
            return shuffled(order, self.seed)
        return shuffled_in_windows(order, self.seed, self.window)

    def stream(self, plan: Plan) -> None:
        plan.steps.append(self._windows)

    def _windows(self, blocks: Iterator[Block], epoch: int) -> Iterator[Block]:
        pool: Block | None = None
        for at, unit in enumerate(cut(blocks, lambda at: self.window or 1)):
            if pool is None:
                pool = unit
                continue
            both = join([pool, unit])
            turn = drawn(len(both), self.seed, (epoch << 32) + at)
            yield take(both, turn[: len(unit)])
            pool = take(both, turn[len(unit) :])
        if pool is not None:
            yield take(pool, drawn(len(pool), self.seed, (epoch << 32) + (1 << 31)))


def shuffle(self: Writable[P], seed: int = 0, *, window: int | None = None) -> P:
    """Use a new order every epoch, which depends on (seed, epoch) alone."""
    try:
        seed = operator.index(seed)
    except TypeError:
        raise DataError(f"shuffle: expected an int as seed, found {seed!r}") from None
    if window is not None and window < 2:
        raise DataError(f"shuffle: a window has at least 2 rows, found {window}")
    return self._with(Shuffle(seed, window))


def shuffled(inner: Order, seed: int) -> Order:
    """Return a new order in every epoch, from (seed, epoch)."""

    def order(epoch: int) -> Numbers:
        numbers = inner(epoch)
        return numbers[drawn(len(numbers), seed, epoch)]

    return order


def shuffled_in_windows(inner: Order, seed: int, window: int) -> Order:
    """Return rows shuffled among `window` neighbors, in shuffled order of the windows.

    For files that do not fit in memory: the rows of a window are next to each other in a file.
    """

    def order(epoch: int) -> Numbers:
        numbers = inner(epoch)
        if not len(numbers):
            return numbers
        parts = [numbers[start : start + window] for start in range(0, len(numbers), window)]
        turn = drawn(len(parts), seed, epoch)
        return np.concatenate(
            [parts[at][drawn(len(parts[at]), seed, (epoch << 32) + int(at) + 1)] for at in turn]
        )

    return order
