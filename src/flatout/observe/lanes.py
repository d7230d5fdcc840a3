"""Where the time of the stepping thread goes: one clock, which always runs for some lane.

Hooks say what begins (`switch`) and time passes to what ran until then, so that nothing is counted
twice and nothing is lost. What follows a batch is forward, what follows a step is host. A batch
that the model has seen only in evaluation goes to that lane as a whole, once the next one is asked
for.
"""

from __future__ import annotations

from array import array
from threading import get_ident
from time import perf_counter_ns
from typing import Any

from flatout.measure.timeline import LANES

INPUT, COPY, FORWARD, BACKWARD, SYNC, OPTIMISER, HOST, EVALUATION, SAVING, GC, IDLE = range(11)
# From a backward pass to what comes next: the step's (clipping) or, in accumulation, the host's.
AFTER = 11
_COUNT = 12
_BETWEEN = (EVALUATION, SAVING)
_FOLD_AT = 4096 * _COUNT
# Durations of single steps that are kept.
_KEPT = 20_000


class Lanes:
    """The lanes of one thread's steps, in ns.

    Attributes:
        thread: the one that steps; calls in others are none of ours.
        steps: how many were closed.
        current: the lane for which the clock runs.
        backwards: backward passes since the last step.
        forwards: calls of outermost modules, ever.
        evaluations: calls of models in evaluation, of which it is not yet known what they were.
        loader: what gave the latest batch.
    """

    __slots__ = (
        "_before",
        "_first",
        "_rows",
        "_seen_backwards",
        "_totals",
        "backwards",
        "current",
        "durations",
        "evaluations",
        "forwards",
        "last",
        "loader",
        "spent",
        "steps",
        "thread",
    )

    def __init__(self) -> None:
        self.thread = get_ident()
        self.steps = 0
        self.current = HOST
        self.backwards = 0
        self.forwards = 0
        self.evaluations: list[Any] = []
        self.loader: Any = None
        self.last = perf_counter_ns()
        self.spent = [0] * _COUNT
        self.durations = array("q")
        self._before = self.spent[:]
        self._seen_backwards = 0
        self._rows = array("q")
        self._totals = [0] * _COUNT
        self._first = [0] * _COUNT

    def switch(self, lane: int) -> int:
        """The time since the last call goes to the lane that ran; returns that one."""
        now = perf_counter_ns()
        before = self.current
        self.spent[before] += now - self.last
        self.last = now
        self.current = lane
        return before

    def begin_batch(self) -> None:
        """A batch, or an iteration over batches, is asked for."""
        self.switch(INPUT)
        if self.evaluations:
            self.judge()
        if not self.steps and not self.backwards:
            self.spent = [0] * _COUNT  # what came before the first batch is no part of a step
        self._before = self.spent[:]
        self._seen_backwards = self.backwards

    def begin_forward(self) -> None:
        """A model is called to be trained."""
        if self.current in (HOST, AFTER):
            self.switch(FORWARD)
            if not self.steps and not self.backwards and self.loader is None:
                self.spent = [0] * _COUNT

    def judge(self) -> None:
        """Decides what the calls in evaluation since the last batch was asked for have been.

        Where a backward pass followed they were a part of training, such as a teacher's.
        """
        if self.backwards == self._seen_backwards:
            moved = 0
            for lane in range(_COUNT):
                if lane not in (EVALUATION, SAVING, GC):
                    moved += self.spent[lane] - self._before[lane]
                    self.spent[lane] = self._before[lane]
            self.spent[EVALUATION] += moved
            self.loader = None
            for seen in self.evaluations:
                seen.was_evaluated(self.steps)
        else:
            self._were_trained()
        self.evaluations.clear()

    def close(self, *, merge: bool = False) -> None:
        """A step has ended here; with `merge` it is still the one that was closed last."""
        self.switch(HOST)
        spent = self.spent
        if merge and self._rows:
            for lane in range(_COUNT):
                self._rows[lane - _COUNT] += spent[lane]
        else:
            spent[OPTIMISER if self.backwards < 2 else HOST] += spent[AFTER]
            spent[AFTER] = 0
            self._rows.extend(spent)
            self.steps += 1
            if len(self._rows) >= _FOLD_AT:
                self._fold(keep=1)
        if self.evaluations:
            self._were_trained()
            self.evaluations.clear()
        self.spent = [0] * _COUNT
        self._before = self.spent[:]
        self.backwards = self._seen_backwards = 0

    def _were_trained(self) -> None:
        for seen in self.evaluations:
            seen.was_trained()

    def end(self) -> None:
        """The script has ended: what is still open is decided, and counted after the last step."""
        self.switch(HOST)
        if self.evaluations:
            self.judge()
        if self._rows:
            for lane in _BETWEEN:
                self._rows[lane - _COUNT] += self.spent[lane]

    def step_ms(self) -> list[float]:
        """Durations of the latest steps in ms, oldest first, without what lies between steps."""
        durations = list(self.durations)
        rows = self._rows
        for at in range(0, len(rows) - len(rows) % _COUNT, _COUNT):
            durations.append(
                sum(rows[at : at + _COUNT]) - sum(rows[at + lane] for lane in _BETWEEN)
            )
        return [ns / 1e6 for ns in durations[-_KEPT:]]

    def lanes_ms(self) -> dict[str, float]:
        """Milliseconds per step by lane. The first of many steps is left out: it sets things up."""
        rows = self._rows[:]
        totals = [self._totals[lane] + sum(rows[lane::_COUNT]) for lane in range(_COUNT)]
        steps = self.steps
        if steps > 3:
            first = self._first if self._totals != [0] * _COUNT else list(rows[:_COUNT])
            totals = [all_ - one for all_, one in zip(totals, first, strict=True)]
            steps -= 1
        return {name: totals[lane] / max(1, steps) / 1e6 for lane, name in enumerate(LANES)}

    def _fold(self, keep: int) -> None:
        """Brings all rows but the latest ones into the totals."""
        rows = self._rows
        if self._totals == [0] * _COUNT:
            self._first = list(rows[:_COUNT])
        whole = len(rows) - keep * _COUNT
        for lane in range(_COUNT):
            self._totals[lane] += sum(rows[lane:whole:_COUNT])
        for at in range(0, whole, _COUNT):
            self.durations.append(
                sum(rows[at : at + _COUNT]) - rows[at + EVALUATION] - rows[at + SAVING]
            )
        del self.durations[:-_KEPT]
        self._rows = rows[whole:]
