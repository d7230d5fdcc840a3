"""repeat: make several passes one epoch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from flatout.data.execution.batch_sampler import Order, whole_number
from flatout.data.stages.batch import Batch
from flatout.data.stages.stage import P, Plan, Stage, Writable, only


@dataclass(frozen=True)
class Repeat(Stage):
    times: int

    once: ClassVar[bool] = True
    repeats = True

    def turn(self, stages: Sequence[Stage]) -> int:
        return 2 if passes(stages) == 1 else 4

    def order(self, order: Order, plan: Plan) -> Order:
        plan.runs.append(self.name)
        return order if self.times == 1 else repeated(order, self.times)


def repeat(self: Writable[P], times: int) -> P:
    """Make several passes one epoch, each in its own order.

    After `batch`, each pass ends with its own last batch, which may be smaller. Before `batch`, a
    batch may hold the end of one pass and the beginning of the next.
    """
    return self._with(Repeat(whole_number("repeat: times", times, 1)))


def repeated(inner: Order, times: int) -> Order:
    return lambda epoch: np.concatenate([inner(epoch * times + i) for i in range(times)])


def times_of(stages: Sequence[Stage]) -> int:
    repeat = only(stages, Repeat)
    return 1 if repeat is None else repeat.times


def passes(stages: Sequence[Stage]) -> int:
    """Return the passes of an epoch that each end with a separate last batch.

    As written: `batch(n).repeat(k)` repeats batches, `repeat(k).batch(n)` repeats samples, so that
    a batch may hold the end of one pass and the beginning of the next.
    """
    met = [type(stage) for stage in stages if isinstance(stage, (Repeat, Batch))]
    return times_of(stages) if met[:1] == [Batch] else 1


def samples_times(stages: Sequence[Stage]) -> int:
    """Return how many times a sample occurs in the passes that end with the same last batch."""
    return times_of(stages) // passes(stages)
