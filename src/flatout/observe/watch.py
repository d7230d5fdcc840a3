"""All that the hooks of one process fill in."""

from __future__ import annotations

import heapq
import os
import sys
import threading
import traceback
from collections.abc import Callable
from itertools import count
from time import perf_counter_ns, thread_time_ns
from typing import Any

from flatout.hooks import is_anything_compiled
from flatout.observe.calls import Calls
from flatout.observe.lanes import Lanes
from flatout.observe.quick import AFTER_STEPS, Quick

# Of the time, that looks may take which can wait.
_LOOKING_SHARE = 0.002
# What is looked at once, in these steps, is no part of what each step takes longer.
FIRST_STEPS = 10
# A training begins where an optimizer is new after so many steps of the one before. So many later
# ones are looked at: some scripts make an optimizer in each step.
_APART, _LATER = AFTER_STEPS, 4
FAILED = "a look failed"
"""The first words of the note of one that did."""


class Enough(BaseException):
    """Raised into the script at the end of a step, when enough was seen."""


class Watch:
    """What was seen so far, and when it is enough.

    Args:
        steps: after how many steps the script is ended; None means never.
        seconds: after how many seconds from the end of its first step; None means never.

    Attributes:
        rows: which rows of a table the model was called with last, to be trained; None of what is
            no table.
        looking_ns: that looks have taken which go on for as long as is watched.
        once_ns: that others have taken: in the first steps, or planned before for a step.
        began: after which step the training began that is looked at.
        on_number: called with each number that comes to the host, two frames below who reads it.
        scaled: the node of the loss that a scaler has multiplied last, in the first steps.
        then: what is done once enough was seen, in place of ending the script.
    """

    def __init__(self, steps: int | None = None, seconds: float | None = None) -> None:
        self.lanes = Lanes()
        self.calls = Calls(self.lanes)
        self.quick = Quick(self.lanes)
        self.loaders: list[Any] = []
        self.optimizers: list[Any] = []
        self.models: list[Any] = []
        self.saved: list[dict[str, Any]] = []
        self.notes: dict[str, None] = {}
        self.frameworks: set[str] = set()
        self.is_enough = False
        self.with_gradients: list[Callable[[], None]] = []
        self.before_backward: list[Callable[[Any], None]] = []
        self.before_clipping: list[Callable[[], None]] = []
        self.scaled: Any = None
        self.on_number: list[Callable[[float], None]] = []
        self.on_batch: list[Callable[[Any, Any, bool], None]] = []
        self.on_new_optimizer: list[Callable[[], None]] = []
        self.on_training: list[Callable[[], None]] = []
        self.before_saving: list[Callable[[], None]] = []
        self.rows: object = None
        self.looking_ns = self.once_ns = self._waited_ns = 0
        self.on_renewal: list[Callable[[], None]] = []
        self.on_enough_again: Callable[[], None] = lambda: None
        self.then: Callable[[], None] | None = None
        self._most = sys.maxsize if steps is None else steps
        self._seconds = seconds
        self._later: list[tuple[int, Callable[[], None]]] = []
        self._begin()
        self._looks: list[tuple[int, int, Callable[[], None], bool]] = []
        self._planned: list[tuple[int, Callable[[], None]]] = []
        self._order = count()
        self._has_begun = False
        self._made, self._since = perf_counter_ns(), 0
        self.at_each(AFTER_STEPS, self.quick.begin)
        self.on_renewal.append(self.quick.renew)

    def _begin(self) -> None:
        self.began = self._trainings = 0
        self._before: dict[int, int] = {}  # steps of each optimizer when this training began

    @property
    def is_beginning(self) -> bool:
        """Whether a training is in its first steps, which the hooks in Python see."""
        return self.lanes.steps < self.began + AFTER_STEPS

    @property
    def start_s(self) -> float | None:
        """Seconds from the beginning to the end of its first step; None before that."""
        return (self._since - self._made) / 1e9 if self._has_begun else None

    def at(self, step: int, look: Callable[[], None], *, is_once: bool = False) -> None:
        """Calls `look` in the thread that steps, once so many steps have ended.

        Args:
            step: how many.
            look: what to do.
            is_once: whether that comes no oftener where more is watched, though it is not planned
                from the beginning.
        """
        is_planned = not self.optimizers
        if is_planned:  # from the beginning, so also when that is renewed
            self._planned.append((step, look))
        heapq.heappush(self._looks, (step, next(self._order), look, is_planned or is_once))
        self.lanes.due = min(self.lanes.due, step)

    def at_each(self, step: int, look: Callable[[], None]) -> None:
        """Calls `look` once so many steps of each training have ended; planned from the start."""
        self._later.append((step, look))
        self.at(step, look)

    def training_begins(self) -> None:
        """An optimizer has stepped that did not before: a later training may have begun, as of
        another fold, or another part of the model. Its first steps are seen as the very first are,
        by the hooks in Python."""
        steps = self.lanes.steps
        if steps < self.began + _APART or self._trainings == _LATER or is_anything_compiled():
            return
        self._trainings += 1
        self.began = steps
        self.quick.rest()
        self._before = {id(item): item.steps for item in self.optimizers}
        for begin in self.on_training:
            self.attempt(begin)
        for step, look in self._later:
            self.at(steps + step, look, is_once=True)

    def stepping(self) -> list[Any]:
        """The optimizers of this training: those that have stepped since it began."""
        return [item for item in self.optimizers if item.steps != self._before.get(id(item))]

    def renew(self) -> None:
        """Forgets all that was seen; in the thread that steps, between steps."""
        for kept in (self.optimizers, self.models, self.saved, self.notes, self.frameworks):
            kept.clear()
        self.looking_ns = self.once_ns = self._waited_ns = 0
        self._has_begun = False
        self._made = perf_counter_ns()
        self._begin()
        self.lanes.renew()
        self.calls.renew()
        for renew in self.on_renewal:
            renew()
        planned, self._planned = self._planned, []
        self._looks.clear()
        for step, look in planned:
            self.at(step, look)

    def attend(self) -> None:
        """A step has ended that was due, or the time is over.

        Raises:
            Enough: the script is to end here.
        """
        lanes = self.lanes
        if not self._has_begun:
            self._has_begun = True
            self._since = lanes.last
            self.calls.forget()  # what came before the first step is no part of what is observed
            if self._seconds is not None:
                lanes.until = perf_counter_ns() + int(self._seconds * 1e9)
        while self._looks and self._looks[0][0] <= lanes.steps:
            *_, look, is_planned = heapq.heappop(self._looks)
            self.aside(look, is_once=is_planned)
        lanes.due = min(self._looks[0][0] if self._looks else self._most, self._most)
        lanes.skip()  # looking was no part of a step
        if lanes.steps >= self._most or lanes.last >= lanes.until:
            self._end()

    def aside(self, *looks: Callable[[], None], is_once: bool = False) -> None:
        """Calls `looks`: what they do is no part of a step, and none of the script's calls.

        One that fails is noted: no mistake of ours may end the script.

        Args:
            looks: what to do.
            is_once: whether that comes no oftener where more is watched.
        """
        lanes = self.lanes
        thread, lanes.thread = lanes.thread, 0
        began, began_cpu = perf_counter_ns(), thread_time_ns()
        try:
            for look in looks:
                self.attempt(look)
        finally:
            lanes.thread = thread
            took = perf_counter_ns() - began
            lanes.leave_out(took)
            is_first = lanes.steps <= FIRST_STEPS
            if not is_first:
                self._waited_ns += took
            # Other work on the machine makes a look longer, but not what it adds.
            cost = min(took, thread_time_ns() - began_cpu)
            if not (is_first or is_once):
                self.looking_ns += cost
            elif lanes.steps:
                self.once_ns += cost

    def attempt(self, look: Callable[..., None], *args: Any) -> None:
        """Calls `look`; one that fails is noted, and only what it would have seen is missing."""
        try:
            look(*args)
        except Exception as error:
            self.notes[_failure(error)] = None

    def affords(self, ns: int) -> bool:
        """Whether a look that takes so long is cheap beside all that was watched until now."""
        watched = self.lanes.last - self._since
        return self._waited_ns + ns <= _LOOKING_SHARE * watched

    def go_on(self, seconds: float) -> None:
        """Watches for so many seconds more; to be called in `then`."""
        self.lanes.until = perf_counter_ns() + int(seconds * 1e9)
        self.lanes.due = self._looks[0][0] if self._looks else sys.maxsize

    def enough(self) -> None:
        """Ends the script at the end of a step, this one or the next."""
        self._most = self.lanes.due = 0

    def _end(self) -> None:
        then, self.then = self.then, None
        if then is not None:
            lanes = self.lanes
            lanes.due = self._most = lanes.until = sys.maxsize
            then()
            lanes.skip()
            return
        if self.is_enough or threading.current_thread() is not threading.main_thread():
            # The script has caught the first one and goes on, or this would end a thread alone.
            self.is_enough = True
            self.on_enough_again()
        self.is_enough = True
        raise Enough


def _failure(error: Exception) -> str:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    place = f"{os.path.basename(frame.filename)}:{frame.lineno}"
    return f"{FAILED}, and what it would have seen is missing: {error!r} ({place})"
