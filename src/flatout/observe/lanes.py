"""Time of the stepping thread by lane: one clock, which always runs for some lane.

Hooks announce what begins (`switch`), and the time since the last hook goes to the former lane.
Nothing is counted twice, and nothing is lost. Forward follows a batch, and the host's time follows
a step. A batch that models got only for evaluation goes to the evaluation lane as a whole, once the
next batch is requested.
"""

from __future__ import annotations

from dataclasses import dataclass
from threading import get_ident
from time import perf_counter_ns
from typing import Any

from flatout.kernels import (
    AFTER,
    BACKWARD,
    COPY,
    EVALUATION,
    FORWARD,
    GC,
    HOST,
    IDLE,
    INPUT,
    KEPT,
    OPTIMIZER,
    SAVING,
    SYNC,
    Clock,
)
from flatout.measure import LANES

__all__ = [
    "AFTER",
    "BACKWARD",
    "COPY",
    "EVALUATION",
    "FORWARD",
    "GC",
    "HOST",
    "IDLE",
    "INPUT",
    "OPTIMIZER",
    "SAVING",
    "SYNC",
    "Lanes",
    "Unseen",
]

_NOTHING = [0] * (AFTER + 1)


@dataclass
class Unseen:
    """Time that each step spends for one lane while the clock runs for another.

    Attributes:
        since, until: range of steps; `until` is None for all later steps.
        ns: nanoseconds per step.
        before, after: index of the lane that the clock runs for, and of the lane that the time
            belongs to.
    """

    since: int
    ns: float
    before: int
    after: int
    until: int | None = None


class Lanes(Clock):
    """Lanes of one thread's steps, in ns, and the clock that fills them.

    Calls in other threads are ignored.
    """

    __slots__ = ("_unseen",)

    def __init__(self) -> None:
        super().__init__()
        self._unseen: list[Unseen] = []
        self.due = 1

    def skip(self) -> None:
        """Exclude the time since the last call, which the observation has spent, from all lanes."""
        now = perf_counter_ns()
        self.began += now - self.last
        self.last = now

    def leave_out(self, ns: int) -> None:
        """Exclude `ns` since the last call, which the observation has spent, from all lanes."""
        self.began += ns
        self.last += ns

    def takes_each_step(self, ns: float, before: int, after: int) -> Unseen:
        """Move `ns` per later step between lanes, since that time is no longer measured."""
        self._unseen.append(Unseen(self.steps, ns, before, after))
        return self._unseen[-1]

    def begin_batch(self) -> bool:
        """Record a request of a batch or of an iterator; return whether this thread requests it."""
        asked = self.ask()
        if asked > 0:
            self.decide()
        return asked >= 0

    def decide(self) -> None:
        """Handle a batch's request: judge open evaluations, forget the set-up, mark the lanes."""
        if self.evaluations:
            self.judge()
        if not self.steps and not self.backwards:
            self._forget()  # the time before the first batch is no part of a step
        self.mark()

    def begin_training(self) -> None:
        """Record that a model is called to train, before the first step."""
        if not self.backwards and self.loader is None:
            self._forget()

    def _forget(self) -> None:
        self.spent = _NOTHING
        self.began = self.last
        if self.before is not None:
            self.mark()  # the marks are forgotten, too

    def begin_evaluation(self, seen: Any) -> None:
        """Record that a model is called, perhaps to be evaluated."""
        self.evaluations.append(seen)
        if not self.is_open and self.before is None:
            backwards = self.seen_backwards
            self.switch(self.current)  # the time before this call is no part of the evaluation
            self.mark()
            self.seen_backwards = backwards  # backward passes before this batch, not this call
        self.is_open = self.wants_told = True

    def judge(self) -> None:
        """Judge the open evaluation calls since the last request of a batch.

        If a backward pass followed, they were a part of training, such as a teacher's calls.
        """
        if self.backwards == self.seen_backwards:
            self.switch(self.current)  # the time until now is a part of the evaluation
            spent = self.spent
            for lane, before in enumerate(self.before or spent):
                if lane not in (EVALUATION, SAVING, GC):
                    self.shift(spent[lane] - before, lane, EVALUATION)
            self.loader = None
            for evaluation in self.evaluations:
                evaluation.was_evaluated(self.steps)
        else:
            self._were_trained()
        self.unmark()
        self._clear()

    def settle(self) -> None:
        """End a step: calls not yet classified as evaluation were a part of this step."""
        self._were_trained()
        self._clear()

    def _were_trained(self) -> None:
        for evaluation in self.evaluations:
            evaluation.was_trained()

    def _clear(self) -> None:
        self.evaluations.clear()
        self.is_open = self.wants_told = False

    def end(self) -> None:
        """End with the script: judge open calls, and count their time after the last step."""
        self.switch(HOST)
        if self.evaluations:
            self.judge()
        self._drop_open()

    def _drop_open(self) -> None:
        spent = self.spent
        between = spent[EVALUATION] + spent[SAVING]
        # The remaining time was nearly all spent in the host lane.
        rest = self.last - self.began - between + self.between
        spent[HOST] = max(self.first[HOST], spent[HOST] - rest)
        self.spent = spent
        self.between = between
        self.began = self.last

    def pause(self, *, keep: bool = True) -> None:
        """Stop the clock between two cells of a notebook.

        Args:
            keep: whether an open step continues in the next cell; not after an error.
        """
        self.switch(HOST)
        if self.evaluations:
            self.judge()
        if not (keep and self.backwards):
            self.backwards = 0
            self._drop_open()
        self.mark()
        self.thread = 0

    def resume(self) -> None:
        """Continue the clock; the calling thread steps from now on."""
        self.skip()
        self.current = HOST
        self.is_inside = False
        self.thread = get_ident()

    def renew(self) -> None:
        """Reset all counts; the observed thread stays the same."""
        thread = self.thread
        Lanes.__init__(self)
        self.thread = thread

    def step_ms(self, most: int = KEPT) -> list[float]:
        """Return the durations of the latest steps in ms, oldest first, without evaluations."""
        return [ns / 1e6 for ns in self.step_ns(most)]

    def lanes_ms(self) -> dict[str, float]:
        """Return ms per step by lane, without the first of many steps, which sets things up."""
        steps, totals = self.steps, self.spent
        if steps > 3:
            totals = [whole - first for whole, first in zip(totals, self.first, strict=True)]
            steps -= 1
        for item in self._unseen:
            until = self.steps if item.until is None else item.until
            moved = min(totals[item.before], round(item.ns * (until - item.since)))
            totals[item.before] -= moved
            totals[item.after] += moved
        totals[HOST] += totals[AFTER]  # both are spent in the user's code
        return {name: totals[lane] / max(1, steps) / 1e6 for lane, name in enumerate(LANES)}
