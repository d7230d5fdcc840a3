"""Steps of embedding tables by rows: gradients of the rows read, and rows on other ranks."""

from __future__ import annotations

from collections.abc import Callable

from flatout.train.loop_state import LoopState
from flatout.train.part import Done, Part, Step
from flatout.train.start_tuning import report_tables


class TableRows(Part):
    """Fetches the rows that a step reads, and excludes tables that a step reads whole."""

    def __init__(self, loop: LoopState) -> None:
        self._loop = loop

    def around_step(self, step: Step, run: Callable[[Step], Done]) -> Done:
        """Make the step; lookups return rows of this rank and of other ranks."""
        stepper = self._loop.stepper
        shards = stepper.switch.shards
        if shards is None:
            return run(step)
        stepper.switch.spread_rows()
        with shards.step():
            return run(step)

    def before_sum(self, step: Step) -> None:
        """Merge the rows that several micro-batches have read."""
        for rows in self._loop.stepper.switch.rows.values():
            rows.merge()

    def after_step(self, step: Step, done: Done) -> None:
        """Step a table whole from now on if the step has read it whole."""
        stepper = self._loop.stepper
        if stepper.switch.leave_read_whole():
            stepper.strategy.renew()
            report_tables(self._loop, [])
