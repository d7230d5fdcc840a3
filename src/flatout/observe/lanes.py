"""Where the time of the stepping thread goes: one clock, which always runs for some lane.

Hooks say what begins (`switch`) and time passes to what ran until then, so that nothing is counted
twice and nothing is lost. What follows a batch is forward, what follows a step is host. A batch
that the model has seen only in evaluation goes to that lane as a whole, once the next one is asked
for.
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
    """What each step spends for one lane while the clock runs for another.

    Attributes:
        since, until: the steps between which it does; None for all to come.
        ns: per step.
        before, after: the lane that the clock runs for, and that which it is spent for.
    """

    since: int
    ns: float
    before: int
    after: int
    until: int | None = None


class Lanes(Clock):
    """The lanes of one thread's steps, in ns, and the clock that fills them.

    Calls in another thread than that which steps are none of ours.
    """

    __slots__ = ("_unseen",)

    def __init__(self) -> None:
        super().__init__()
        self._unseen: list[Unseen] = []
        self.due = 1

    def skip(self) -> None:
        """The time since the last call was ours, and goes to no one."""
        now = perf_counter_ns()
        self.began += now - self.last
        self.last = now

    def leave_out(self, ns: int) -> None:
        """So much of the time since the last call was ours, and goes to no one."""
        self.began += ns
        self.last += ns

    def takes_each_step(self, ns: float, before: int, after: int) -> Unseen:
        """In the steps to come so much of one lane's time is another's: no one looks any more."""
        self._unseen.append(Unseen(self.steps, ns, before, after))
        return self._unseen[-1]

    def begin_batch(self) -> bool:
        """A batch, or an iteration over batches, is asked for: whether in this thread."""
        asked = self.ask()
        if asked > 0:
            self.decide()
        return asked >= 0

    def decide(self) -> None:
        """What else is to be done where a batch is asked for, before the lanes are marked."""
        if self.evaluations:
            self.judge()
        if not self.steps and not self.backwards:
            self._forget()  # what came before the first batch is no part of a step
        self.mark()

    def begin_training(self) -> None:
        """A model is called to be trained, before the first step."""
        if not self.backwards and self.loader is None:
            self._forget()

    def _forget(self) -> None:
        self.spent = _NOTHING
        self.began = self.last
        if self.before is not None:
            self.mark()  # where they stood is forgotten, too

    def begin_evaluation(self, seen: Any) -> None:
        """A model is called, perhaps to be evaluated."""
        self.evaluations.append(seen)
        if not self.is_open and self.before is None:
            backwards = self.seen_backwards
            self.switch(self.current)  # what came before it is none of its
            self.mark()
            self.seen_backwards = backwards  # of the step, not of this call
        self.is_open = self.wants_told = True

    def judge(self) -> None:
        """Decides what the calls in evaluation since the last batch was asked for have been.

        Where a backward pass followed they were a part of training, such as a teacher's.
        """
        if self.backwards == self.seen_backwards:
            self.switch(self.current)  # until now it was theirs
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
        """A step has ended: the open calls in evaluation were a part of it."""
        self._were_trained()
        self._clear()

    def _were_trained(self) -> None:
        for evaluation in self.evaluations:
            evaluation.was_trained()

    def _clear(self) -> None:
        self.evaluations.clear()
        self.is_open = self.wants_told = False

    def end(self) -> None:
        """The script has ended: what is still open is decided, and counted after the last step."""
        self.switch(HOST)
        if self.evaluations:
            self.judge()
        self._drop_open()

    def _drop_open(self) -> None:
        spent = self.spent
        between = spent[EVALUATION] + spent[SAVING]
        # Nearly all of it was the host's.
        rest = self.last - self.began - between + self.between
        spent[HOST] = max(self.first[HOST], spent[HOST] - rest)
        self.spent = spent
        self.between = between
        self.began = self.last

    def pause(self, *, keep: bool = True) -> None:
        """No one's time begins: between two cells of a notebook.

        Args:
            keep: a step that is open belongs to what comes next; not after an error.
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

    def step_ms(self, most: int = KEPT) -> list[float]:
        """Durations of the latest steps in ms, oldest first, without what lies between steps."""
        return [ns / 1e6 for ns in self.step_ns(most)]

    def lanes_ms(self) -> dict[str, float]:
        """Milliseconds per step by lane. The first of many steps is left out: it sets things up."""
        steps, totals = self.steps, self.spent
        if steps > 3:
            totals = [whole - first for whole, first in zip(totals, self.first, strict=True)]
            steps -= 1
        for item in self._unseen:
            until = self.steps if item.until is None else item.until
            moved = min(totals[item.before], round(item.ns * (until - item.since)))
            totals[item.before] -= moved
            totals[item.after] += moved
        totals[HOST] += totals[AFTER]  # before a step, as between two of them, it is the user's
        return {name: totals[lane] / max(1, steps) / 1e6 for lane, name in enumerate(LANES)}
