"""Tries a Loop's open settings on its steps, and applies the result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from flatout.data import Batch
from flatout.recipe import Parity
from flatout.train.graphs.capture import Capture
from flatout.train.graphs.graphs import graphs_of
from flatout.train.loop_state import LoopState
from flatout.train.losses.loss_value import Compute
from flatout.train.tables.row_tables import Tables
from flatout.train.tuning import auto
from flatout.train.tuning.auto import Decision
from flatout.train.tuning.compile_trial import BackgroundCompile
from flatout.train.tuning.search import Search
from flatout.train.tuning.tuner import Tuner


def tune(loop: LoopState, decision: Decision, changed: Callable[[], None]) -> Tuner:
    """Begin to try open settings, from the next step on."""
    assert decision.search is not None
    result = partial(settle, loop, decision)
    tuner = Tuner(
        decision.search,
        loop.stepper,
        loop.feed,
        loop.world,
        result,
        loop.note,
        changed=changed,
        uncounted=lambda: loop.trainer.uncounted(),  # a Trainer sets it later
    )
    loop.stepper.chain.add(tuner)
    return tuner


def settle(loop: LoopState, decision: Decision, tuner: Tuner) -> None:
    """Apply the result of the trials, from the next step on."""
    assert loop.resolved is not None
    loop.resolved, line = auto.settle(
        decision,
        loop.resolved,
        loop.asked.recipe,
        tuner.why,
        suffices=tuner.suffices,
        pending=tuner.is_pending,
    )
    if tuner.of_capture and tuner.beside is not None:
        line = auto.captured_line(tuner.search, tuner.beside)
    if line:
        loop.note(line)
    report_tables(loop, [])


def capture_steps(loop: LoopState, compute: Compute | None, search: Search | None) -> None:
    """Run the steps of this job as one compiled graph, or let the tuner try that."""
    assert loop.resolved is not None
    stepper, tries = loop.stepper, search is not None and search.captures
    is_asked = not tries and loop.resolved.compute.capture == "on"
    graphs = graphs_of(stepper)
    if graphs.compiled is not None:  # the graph belongs to the previous job
        graphs.compiled.close()
        graphs.compiled = None
    if is_asked or tries:
        may_lend = loop.asked.recipe.process.threads == "auto"
        capture = Capture(stepper, loop.note, loop.is_tuning, is_asked, may_lend, loop.terms)
        graphs.compiled = capture
        loop.undo.callback(capture.close)
        if loop.tuner is not None and search is not None and tries:
            loop.tuner.beside = BackgroundCompile(capture, compute, search)


def report_tables(loop: LoopState, first: Sequence[Batch]) -> None:
    """Report how embedding tables are stepped, if any is stepped by rows or a large one is not."""
    switch, tables = loop.stepper.switch, loop.stepper.switch.tables
    if tables is None and first and _may_step_by_rows(loop):
        result = Tables.of(switch.model, switch.optimizers, split=switch.splits_tables)
        tables = result if result.are_whole_though_large(first[0]) else None
    if tables is None or tables.words == loop.progress.reported_tables:
        return
    loop.progress.reported_tables = tables.words
    (loop.note if loop.resume is None else loop.say)(tables.words)


def _may_step_by_rows(loop: LoopState) -> bool:
    asked = loop.asked.recipe.compute.touched_rows
    is_allowed = asked == "auto" and loop.asked.allow >= Parity.TOLERANT
    return asked == "on" or (loop.device.type == "cpu" and is_allowed)
