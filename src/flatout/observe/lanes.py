"""Where the time of the stepping thread goes: one clock, which always runs for some lane.

Hooks say what begins (`switch`) and time passes to what ran until then, so that nothing is counted
twice and nothing is lost. What follows a batch is forward, what follows a step is host. A batch
that the model has seen only in evaluation goes to that lane as a whole, once the next one is asked
for.
"""

from __future__ import annotations

import sys
from array import array
from threading import get_ident
from time import perf_counter_ns
from typing import Any

from flatout.kernels.clock import Clock
from flatout.measure.timeline import LANES

INPUT, COPY, FORWARD, BACKWARD, SYNC, OPTIMISER, HOST, EVALUATION, SAVING, GC, IDLE = range(11)
# From a backward pass to what comes next: the optimiser's or, in accumulation, the host's.
AFTER = 11
_COUNT = 12
_BETWEEN = (EVALUATION, SAVING)
_NOTHING = [0] * _COUNT
# Durations of single steps that are kept.
_KEPT = 20_000


class Lanes(Clock):
    """The lanes of one thread's steps, in ns, and the clock that fills them.

    Calls in another thread than that which steps are none of ours.

    Attributes:
        began: when the step that is open began.
        steps: how many were closed.
        backwards: backward passes since the last step.
        is_inside: whether a model is being called.
        evaluations: calls of models in evaluation, of which it is not yet known what they were.
        loader: what gave the latest batch.
        due, until: the number of steps, and the time, at which somebody wants to be called.
    """

    __slots__ = (
        "_after",
        "_before",
        "_between",
        "_durations",
        "_first",
        "_seen_backwards",
        "backwards",
        "began",
        "due",
        "evaluations",
        "is_inside",
        "loader",
        "steps",
        "until",
    )

    def __init__(self) -> None:
        super().__init__(_COUNT, HOST)
        self.began = self.last
        self.steps = 0
        self.backwards = self._seen_backwards = 0
        self.is_inside = False
        self.evaluations: list[Any] = []
        self.loader: Any = None
        self.due = 1
        self.until = sys.maxsize
        self._durations = array("q")
        self._between = 0  # of the lanes between steps, when the last step ended
        self._after = 0  # of that lane, likewise
        self._first: list[int] = _NOTHING
        # Where the lanes stood when a batch was asked for, or a model first called in evaluation.
        self._before: list[int] | None = None

    def skip(self) -> None:
        """The time since the last call was ours, and goes to nobody."""
        now = perf_counter_ns()
        self.began += now - self.last
        self.last = now

    def leave_out(self, ns: int) -> None:
        """So much of the time since the last call was ours, and goes to nobody."""
        self.began += ns
        self.last += ns

    def begin_batch(self) -> None:
        """A batch, or an iteration over batches, is asked for."""
        self.switch(INPUT)
        if self.evaluations:
            self.judge()
        if not self.steps and not self.backwards:
            self._forget()  # what came before the first batch is no part of a step
        self._before = self.spent[:]
        self._seen_backwards = self.backwards

    def begin_training(self) -> None:
        """A model is called to be trained, before the first step."""
        if not self.backwards and self.loader is None:
            self._forget()

    def _forget(self) -> None:
        self.spent[:] = _NOTHING
        self.began = self.last

    def begin_evaluation(self) -> None:
        """A model is called, perhaps to be evaluated."""
        if self._before is None:
            self._before = self.spent[:]

    def judge(self) -> None:
        """Decides what the calls in evaluation since the last batch was asked for have been.

        Where a backward pass followed they were a part of training, such as a teacher's.
        """
        if self.backwards == self._seen_backwards:
            moved = 0
            before = self._before or self.spent
            for lane in range(_COUNT):
                if lane not in (EVALUATION, SAVING, GC):
                    moved += self.spent[lane] - before[lane]
                    self.spent[lane] = before[lane]
            self.spent[EVALUATION] += moved
            self.loader = None
            for seen in self.evaluations:
                seen.was_evaluated(self.steps)
        else:
            self._were_trained()
        self._before = None
        self.evaluations.clear()

    def close(self, merge: bool = False) -> None:
        """A step has ended when last looked; with `merge` it is still the one closed last."""
        lap = self.last - self.began
        self.began = self.last
        spent = self.spent
        if self.backwards > 1:
            after = spent[AFTER] - self._after
            spent[AFTER] -= after
            spent[HOST] += after
        self._after = spent[AFTER]
        between = spent[EVALUATION] + spent[SAVING]
        took = lap - between + self._between
        self._between = between
        if merge and self.steps:
            self._durations[-1] += took
        else:
            self._durations.append(took)
            self.steps += 1
        self._before = None
        if self.evaluations:
            self._were_trained()
            self.evaluations.clear()
        self.backwards = self._seen_backwards = 0
        if self.steps == 1:
            self._first = spent[:]
        elif len(self._durations) > 2 * _KEPT:
            del self._durations[:_KEPT]

    def _were_trained(self) -> None:
        for seen in self.evaluations:
            seen.was_trained()

    def end(self) -> None:
        """The script has ended: what is still open is decided, and counted after the last step."""
        self.switch(HOST)
        if self.evaluations:
            self.judge()
        self._drop_open()

    def _drop_open(self) -> None:
        """What came since the last step is no part of any, but for what lies between steps."""
        between = self.spent[EVALUATION] + self.spent[SAVING]
        # Nearly all of it was the host's.
        rest = self.last - self.began - between + self._between
        self.spent[HOST] = max(self._first[HOST], self.spent[HOST] - rest)
        self._between = between
        self.began = self.last

    def pause(self, *, keep: bool = True) -> None:
        """Nobody's time begins: between two cells of a notebook.

        Args:
            keep: a step that is open belongs to what comes next; not after an error.
        """
        self.switch(HOST)
        if self.evaluations:
            self.judge()
        if not (keep and self.backwards):
            self.backwards = 0
            self._drop_open()
        self._before = self.spent[:]
        self._seen_backwards = self.backwards
        self.thread = 0

    def resume(self) -> None:
        """The calling thread steps from now on."""
        self.skip()
        self.current = HOST
        self.is_inside = False
        self.thread = get_ident()

    def renew(self) -> None:
        """Begins to count, in the same thread."""
        thread = self.thread
        Lanes.__init__(self)
        self.thread = thread

    def step_ms(self) -> list[float]:
        """Durations of the latest steps in ms, oldest first, without what lies between steps."""
        return [ns / 1e6 for ns in self._durations[-_KEPT:]]

    def lanes_ms(self) -> dict[str, float]:
        """Milliseconds per step by lane. The first of many steps is left out: it sets things up."""
        steps, totals = self.steps, self.spent[:]
        if steps > 3:
            totals = [whole - first for whole, first in zip(totals, self._first, strict=True)]
            steps -= 1
        totals[OPTIMISER] += totals[AFTER]
        return {name: totals[lane] / max(1, steps) / 1e6 for lane, name in enumerate(LANES)}
