"""Data that all hooks of one process write to."""

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

# Largest share of the observed time that deferrable looks (inspections between steps) may take.
_LOOKING_SHARE = 0.002
# Number of first steps of the script in which the time of looks counts as one-time overhead.
FIRST_STEPS = 10
# _APART: minimum number of steps between the beginnings of two trainings, each begun by a new
# optimizer; _LATER: maximum number of later trainings that are observed, since some scripts make an
# optimizer in each step.
_APART, _LATER = AFTER_STEPS, 4
FAILED = "a look failed"
"""Prefix of the note on a look that raised an exception."""


class Enough(BaseException):
    """Raised into the script at the end of a step, when the observation is complete."""


class Watch:
    """State of the observation of one process, and the decision when to end it.

    A look is a function that inspects the script between two steps.

    Args:
        steps: number of steps after which the script is ended; None means never.
        seconds: seconds from the end of the first step until the script is ended; None means never.

    Attributes:
        rows: row indices of a table in the last training call of the model; None where the model's
            input is no rows of a table.
        looking_ns: nanoseconds spent in looks that recur as long as the observation lasts.
        once_ns: nanoseconds spent in all other looks: in the first steps, or planned beforehand for
            a certain step.
        began: number of steps before the observed training began.
        on_number: functions that are called with each number read from a tensor, two frames below
            the reader.
        scaled: graph node of the loss that a gradient scaler scaled last, in the first steps.
        then: function that is called when the observation is complete, instead of ending the
            script.
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
        self._before: dict[int, int] = {}  # number of each optimizer's steps before this training

    @property
    def is_beginning(self) -> bool:
        """True while a training is in its first steps, which the Python hooks record."""
        return self.lanes.steps < self.began + AFTER_STEPS

    @property
    def start_s(self) -> float | None:
        """Seconds from the start to the end of the first step; None before that."""
        return (self._since - self._made) / 1e9 if self._has_begun else None

    def at(self, step: int, look: Callable[[], None], *, is_once: bool = False) -> None:
        """Call `look` in the stepping thread after `step` steps have ended.

        Args:
            step: number of steps.
            look: the function to call.
            is_once: whether a longer observation calls `look` no more often, even if `look` was not
                planned before the first optimizer.
        """
        is_planned = not self.optimizers
        if is_planned:  # recorded, to be planned again by `renew`
            self._planned.append((step, look))
        heapq.heappush(self._looks, (step, next(self._order), look, is_planned or is_once))
        self.lanes.due = min(self.lanes.due, step)

    def at_each(self, step: int, look: Callable[[], None]) -> None:
        """Call `look` after `step` steps of each training; to be planned from the start."""
        self._later.append((step, look))
        self.at(step, look)

    def training_begins(self) -> None:
        """Record that an optimizer has stepped for the first time.

        A later training may have begun, such as another fold or another part of the model. The
        Python hooks record its first steps like those of the first training.
        """
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
        """Return the optimizers that have stepped since this training began."""
        return [item for item in self.optimizers if item.steps != self._before.get(id(item))]

    def renew(self) -> None:
        """Forget all recorded data; to be called in the stepping thread, between steps."""
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
        """Handle the end of a step that was due, or the end of the observed time.

        Raises:
            Enough: the script is to end here.
        """
        lanes = self.lanes
        if not self._has_begun:
            self._has_begun = True
            self._since = lanes.last
            self.calls.forget()  # calls before the first step are not observed
            if self._seconds is not None:
                lanes.until = perf_counter_ns() + int(self._seconds * 1e9)
        while self._looks and self._looks[0][0] <= lanes.steps:
            *_, look, is_planned = heapq.heappop(self._looks)
            self.aside(look, is_once=is_planned)
        lanes.due = min(self._looks[0][0] if self._looks else self._most, self._most)
        lanes.skip()  # the time of looks is no part of a step
        if lanes.steps >= self._most or lanes.last >= lanes.until:
            self._end()

    def aside(self, *looks: Callable[[], None], is_once: bool = False) -> None:
        """Call `looks`, without counting their time as a step's or their calls as the script's.

        The exception of a failed look becomes a note: no mistake of ours may end the script.

        Args:
            looks: the functions to call.
            is_once: whether a longer observation calls them no more often.
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
            # Other load on the machine lengthens the wall time of a look, but not its CPU time.
            cost = min(took, thread_time_ns() - began_cpu)
            if not (is_first or is_once):
                self.looking_ns += cost
            elif lanes.steps:
                self.once_ns += cost

    def attempt(self, look: Callable[..., None], *args: Any) -> None:
        """Call `look`; if that fails, add a note, since only the data of this look are missing."""
        try:
            look(*args)
        except Exception as error:
            self.notes[_failure(error)] = None

    def affords(self, ns: int) -> bool:
        """Return whether another look of `ns` keeps all looks within their share of the time."""
        watched = self.lanes.last - self._since
        return self._waited_ns + ns <= _LOOKING_SHARE * watched

    def go_on(self, seconds: float) -> None:
        """Observe for `seconds` more; to be called in `then`."""
        self.lanes.until = perf_counter_ns() + int(seconds * 1e9)
        self.lanes.due = self._looks[0][0] if self._looks else sys.maxsize

    def enough(self) -> None:
        """End the script at the end of this step or the next."""
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
            # The script has caught the first exception, or raising would end only this thread.
            self.is_enough = True
            self.on_enough_again()
        self.is_enough = True
        raise Enough


def _failure(error: Exception) -> str:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    place = f"{os.path.basename(frame.filename)}:{frame.lineno}"
    return f"{FAILED}, and what it would have seen is missing: {error!r} ({place})"
