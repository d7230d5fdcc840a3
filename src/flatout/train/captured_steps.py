"""Several captured steps in a row, with no other action between two steps than reading a batch.

A single step checks for changes since the previous step, and calls all Parts. If batches come from
arrays in memory and no callback is due, nothing can have changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from time import perf_counter_ns as clock
from typing import Any

from flatout.console import first_line
from flatout.data import ArraySource, Batch
from flatout.train.graphs.capture import FAILURES, Capture
from flatout.train.graphs.graphs import graphs_of
from flatout.train.loop import Loop
from flatout.train.part import Step


def captured_steps(
    loop: Loop, compute: Any, batches: Iterator[Batch], most: int, stops: Callable[[], bool]
) -> Batch | None:
    """Make steps by the compiled graph, if it is loaded; return a batch that the graph refuses."""
    stepper, feed, tuner = loop.stepper, loop.feed, loop.tuner
    if tuner is not None:
        most = min(most, tuner.next_step - 1 - loop.step_count)
    most = min(most, loop.rounding.next_step - 1 - loop.step_count)
    capture = graphs_of(stepper).compiled
    # If batches come from other sources, the user's code runs between steps.
    are_ours = type(feed.source) is ArraySource and loop.asked.accumulate == 1
    if not isinstance(capture, Capture) or most < 1 or not are_ours or loop.asked.parts:
        return None
    program = capture.at_hand()
    if program is None:
        return None
    turn = stepper.turn = stepper.joint
    add, was_bad, record = turn.mean_loss.add, turn.update.was_bad, loop.monitor.captured_step
    make = program.in_a_row(loop.step_count + 1)
    try:
        for _ in range(min(most, program.left)):
            batch = next(batches, None)
            if batch is None:
                return None
            begun = clock()
            try:
                made = make(batch)
            except FAILURES as error:
                capture.give_up(first_line(error))
                made = None
            if made is None:
                capture.refused = batch
                return batch
            stepped = clock()
            program.feed(batch)
            feed.begin_step()
            if was_bad():
                loop.numbers.check_step(Step(loop.next_step, (batch,), compute, turn))
            loop.count_step()
            add(*made)
            record(feed.lanes, stepped - begun, stepped, batch.samples)
            if stops():
                break
    finally:
        program.tell()
    return None
