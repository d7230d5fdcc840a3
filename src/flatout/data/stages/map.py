"""map: apply a user's function to each sample or to each batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from flatout.data.execution.samples import Mapped
from flatout.data.reading.block import Block
from flatout.data.stages.stage import Function, P, Plan, Writable


@dataclass(frozen=True)
class Map(Function):
    """A user's function of one sample or, after `Batch`, of a whole batch."""

    def make(self, plan: Plan) -> None:
        """Add the function where it was written, relative to other functions and to the batch."""
        if plan.batched:
            plan.functions.append(self.function)
            return
        plan.samples = mapped = Mapped(plan.samples, self.function, plan.seed)
        plan.runs.append(mapped.name)

        def step(blocks: Iterator[Block], epoch: int) -> Iterator[Block]:
            return (mapped.apply(block, epoch) for block in blocks)

        plan.steps.append(step)

    choose = stream = make  # stages after this one choose rows by the function's results


def map(self: Writable[P], function: Callable[..., Any]) -> P:
    """Apply a function to each sample, or, after `batch`, to each whole batch.

    The function gets the parts of the samples as tensors: `function(inputs)`,
    `function(inputs, targets)`, or `function(inputs, targets, weight)` if samples have weights.
    It returns x, (x, y) or (x, y, weight). If ranks share batches, a function after `batch` gets
    the whole batch on each rank. A parameter `rng` gets a numpy Generator that depends only on
    (seed, epoch, sample). A function that uses the global generators runs in the iterating thread.
    """
    return self._with(Map(function))
