"""Explanation of errors of a step whose torch messages are hard to understand."""

from __future__ import annotations

from collections.abc import Callable

from flatout.train.checks import explain_kernel
from flatout.train.loop_state import LoopState
from flatout.train.part import Done, Part, Step
from flatout.train.preflight import explain_one_sample
from flatout.train.tables.tables import explain_ids, ids_checked_in_step


class ExplainErrors(Part):
    """Names the sample and table of an id without a row, and the operator without a kernel."""

    def __init__(self, loop: LoopState) -> None:
        self._loop = loop

    def around_step(self, step: Step, run: Callable[[Step], Done]) -> Done:
        """Make the step; explain the cause of an error."""
        loop = self._loop
        try:
            return run(step)
        except (IndexError, RuntimeError, ValueError) as error:
            explain_one_sample(error, step.batches, step.number)
            switch = loop.stepper.switch
            explain_kernel(error, switch.now.precision)
            with switch.rows_as_they_lie():
                explain_ids(error, loop.model, step.batches, step.compute, loop.feed.source)
            raise


class IdChecks(Part):
    """Refuses ids without a row that a table would accept, as Keras' tables do."""

    def __init__(self, loop: LoopState) -> None:
        self._loop = loop

    def around_step(self, step: Step, run: Callable[[Step], Done]) -> Done:
        """Make the step; its ids are checked where torch does not check them."""
        loop = self._loop
        with ids_checked_in_step(loop.model, step.batches, loop.feed.source):
            return run(step)
