"""filter: keep only the samples for which a user's function is true."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from flatout.data.execution.samples import Costs, Samples, name_of
from flatout.data.reading.block import Block, take
from flatout.data.reading.buffers import Buffers
from flatout.data.stages.batch import Batch
from flatout.data.stages.stage import Function, P, Plan, Stage, Writable, only
from flatout.errors import DataError

# Samples that are made and checked together.
_CHUNK = 4096
# Seconds between two lines about progress.
_QUIET_S = 1.0


@dataclass(frozen=True)
class Filter(Function):
    """Keeps only the samples for which a user's function is true."""

    chooses = True

    def check(self, before: Sequence[Stage], behind: Sequence[Stage]) -> None:
        if only(before, Batch) is not None:
            raise DataError(
                "filter comes after batch, where it would leave out whole batches",
                do="put filter before batch",
            )

    def choose(self, plan: Plan) -> None:
        kept, total = [plan.numbers[:0]], len(plan.numbers)
        buffers, costs, reported = Buffers(), Costs(), time.monotonic()
        for start in range(0, total, _CHUNK):
            block = plan.samples.make(plan.numbers[start : start + _CHUNK], buffers, 0, costs)
            kept.append(block.numbers[self._wanted(block, plan.samples)])
            if time.monotonic() - reported > _QUIET_S:
                reported = time.monotonic()
                looked_at = f"looked at {start + len(block):,} of {total:,}"
                plan.say(f"filter {name_of(self.function)}: {looked_at}")
        plan.numbers = np.concatenate(kept)
        if not len(plan.numbers) and not plan.may_be_empty:
            raise DataError(f"filter {name_of(self.function)} leaves none of {total:,} samples")

    def stream(self, plan: Plan) -> None:
        samples = plan.samples

        def step(blocks: Iterator[Block], epoch: int) -> Iterator[Block]:
            for block in blocks:
                if len(kept := np.flatnonzero(self._wanted(block, samples))):
                    yield take(block, kept)

        plan.steps.append(step)

    def _wanted(self, block: Block, samples: Samples) -> Any:
        form = samples.form
        rows = range(len(block))
        return np.array([bool(self.function(*form.sample(block, row))) for row in rows], bool)

    def counted(self, rows: int | None) -> None:
        """Return None: the number of a stream's rows is not known in advance."""


def filter(self: Writable[P], function: Callable[..., Any]) -> P:
    """Keep only the samples for which the function is true. It gets the same arguments as in `map`.

    One pass over all samples finds them, so that they can be counted and shuffled.
    """
    return self._with(Filter(function))
