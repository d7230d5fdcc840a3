"""The clock in Python, for where the C extension is absent."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable, Sequence
from threading import get_ident
from time import perf_counter_ns
from types import CodeType
from typing import Any
from weakref import ref

INPUT, COPY, FORWARD, BACKWARD, SYNC, OPTIMIZER, HOST, EVALUATION, SAVING, GC, IDLE = range(11)
# From a backward pass to what comes next: it is told as the host's.
AFTER = 11
_COUNT = 12
# Durations of single steps that are kept.
KEPT = 20_000


class Called:
    """One model, and how often it was called.

    Attributes:
        ref: a weak reference to it.
        calls: how often it was called.
        due: the call that is looked at next.
        has_parameters: whether it has any.
        goes_on: the modes of an evaluation without gradients that goes on: 1 in eval mode, 2 in
            train mode.
        is_part: the one of calls that were a part of a step whenever they came from a line; or 0.
        code, line: that line, as the code of its function and its number.
        opened: modes of calls of which it is not known yet what they were: 4 and 8 are those with
            gradients.
        acts: whether it is called without gradients before it is trained in most steps.
    """

    def __init__(self) -> None:
        self.ref: ref[Any] | None = None
        self.calls = self.due = self.goes_on = self.is_part = self.opened = self.line = 0
        self.code: CodeType | None = None
        self.has_parameters = self.acts = False


class Loaded:
    """One DataLoader, and how many batches it has given.

    Attributes:
        batches: how many.
        due: the batch that is looked at next.
        keep: called with the nanoseconds that each of the others was waited for, or None.
        wants_samples: whether it is asked which samples batches are made of.
        wants_within: whether it is looked at how batches are made in this process.
    """

    def __init__(self) -> None:
        self.batches = self.due = 0
        self.keep: Callable[[int], object] | None = None
        self.wants_samples = self.wants_within = False


class Clock:
    """The clock of a training loop: it always runs for one of the lanes, at first the host's.

    Called again on the same clock, `__init__` begins again.

    Attributes:
        thread: whose clock it is: the calling one's at first.
        last: when it was looked at, as `time.perf_counter_ns` says.
        began: when the step that is open began.
        current: the lane for which it runs.
        steps: how many have ended.
        backwards: backward passes since the last step.
        between: nanoseconds of evaluation and saving until the last step ended.
        is_inside: whether a model is being called.
        is_open: whether it is undecided what calls of models were: evaluation, or of a step.
        seen_backwards: backward passes when the lanes were marked.
        due, until: the number of steps, and the time, at which someone wants to be called.
        is_counted: whether the optimizer's step that runs has ended a step.
        is_trained_on: whether a backward pass has followed a batch of that loader.
        evaluations: calls of models of which it is not known yet what they were.
        wants_told: whether one of them is new, or from a new line.
    """

    __slots__ = (
        "_after",
        "_asked",
        "_before",
        "_durations",
        "_first",
        "_loader",
        "_spent",
        "backwards",
        "began",
        "between",
        "current",
        "due",
        "evaluations",
        "is_counted",
        "is_inside",
        "is_open",
        "is_trained_on",
        "last",
        "seen_backwards",
        "steps",
        "thread",
        "until",
        "wants_told",
    )

    def __init__(self) -> None:
        self._spent = [0] * _COUNT
        self._first = [0] * _COUNT
        self._durations = array("q")
        self._after = self.between = 0  # of those lanes, when the last step ended
        self._before: list[int] | None = None
        self.steps = self.backwards = self.seen_backwards = 0
        self.is_inside = self.is_open = self.is_counted = self.is_trained_on = False
        self._loader: Any = None
        self.evaluations: list[Any] = []
        self.wants_told = False
        self.due = self.until = sys.maxsize
        self.current = HOST
        self.thread = get_ident()
        self.last = self.began = self._asked = perf_counter_ns()

    @property
    def spent(self) -> list[int]:
        """Nanoseconds by lane, in their own list. It can be set."""
        return self._spent[:]

    @spent.setter
    def spent(self, numbers: Sequence[int]) -> None:
        if len(numbers) != _COUNT:
            raise ValueError("spent takes one number for each lane")
        self._spent = list(numbers)

    @property
    def first(self) -> list[int]:
        """What was spent when the first step ended; zeros before."""
        return self._first[:]

    @property
    def before(self) -> list[int] | None:
        """What was spent at the mark; None without one."""
        return None if self._before is None else self._before[:]

    @property
    def loader(self) -> Any:
        """What gave the latest batch, or None. It can be set: of another one nothing is known."""
        return self._loader

    @loader.setter
    def loader(self, loader: Any) -> None:
        if loader is not self._loader:
            self.is_trained_on = False
            self._loader = loader

    def switch(self, lane: int, /) -> int:
        """The time since the last look goes to the lane that ran; returns that one.

        Raises:
            IndexError: there is no such lane.
        """
        if not 0 <= lane < _COUNT:
            raise IndexError("no such lane")
        now = perf_counter_ns()
        before = self.current
        self._spent[before] += now - self.last
        self.last = now
        self.current = lane
        return before

    def enter(self, lane: int, /) -> int:
        """As `switch`, in the thread of the clock; in another one nothing happens, and -1."""
        return self.switch(lane) if get_ident() == self.thread else -1

    def enter_model(self) -> int:
        """A model is called: returns the lane that runs.

        In another thread, within a model, and while a batch is made, nothing happens, and -1.
        """
        if self.is_inside or self.current == INPUT or get_ident() != self.thread:
            return -1
        self.is_inside = True
        return self.current

    def ask(self) -> int:
        """A batch is asked for: the lanes are marked.

        Returns 1 where there is more to decide before they are: calls in evaluation are open, or
        no step has begun. In another thread and while a batch is made nothing happens, and -1.
        """
        if self.current == INPUT or get_ident() != self.thread:
            return -1
        self.switch(INPUT)
        self._asked = self.last
        if self.is_open or not (self.steps or self.backwards):
            return 1
        self.mark()
        return 0

    def take(self) -> int:
        """The batch has come, and forward begins: for how many ns it was waited for."""
        self.switch(FORWARD)
        return self.last - self._asked

    def mark(self) -> None:
        """Where the lanes and the backward passes stand now is kept."""
        self._before = self._spent[:]
        self.seen_backwards = self.backwards

    def unmark(self) -> None:
        """What was marked is forgotten."""
        self._before = None

    def leave_backward(self, lane: int, /) -> int:
        """As `switch`, and one more backward pass has ended."""
        before = self.switch(lane)
        self.backwards += 1
        return before

    def shift(self, ns: int, before: int, after: int, /) -> None:
        """So much of the time of one lane was another's."""
        if not (0 <= before < _COUNT and 0 <= after < _COUNT):
            raise IndexError("no such lane")
        self._spent[before] -= ns
        self._spent[after] += ns

    def lap(self, merge: bool, /) -> bool:
        """A step has ended when last looked; with `merge` it is still the one that ended last.

        Nothing is marked any more. Returns whether that step, or its end, is due.
        """
        spent = self._spent
        between = spent[EVALUATION] + spent[SAVING]
        took = self.last - self.began - (between - self.between)
        self.began = self.last
        self.between = between
        if self.backwards > 1:  # what lay between them was the host's
            spent[HOST] += spent[AFTER] - self._after
            spent[AFTER] = self._after
        self._after = spent[AFTER]
        self.backwards = self.seen_backwards = 0
        self._before = None
        if merge and self.steps:
            self._durations[-1] += took
        else:
            self._durations.append(took)
            self.steps += 1
        if self.steps == 1:
            self._first = spent[:]
        elif len(self._durations) > 2 * KEPT:
            del self._durations[:KEPT]
        return self.steps >= self.due or self.last >= self.until

    def leave_step(self) -> int:
        """The host's time begins, and a step has ended: whether it is due, as 1 or 0.

        In another thread nothing happens, and -1.
        """
        if get_ident() != self.thread:
            return -1
        self.switch(HOST)
        return int(self.lap(False))

    def step_ns(self, most: int = KEPT, /) -> list[int]:
        """Durations of the latest steps, oldest first, without evaluation and saving."""
        count = min(max(0, most), KEPT, len(self._durations))
        return self._durations[len(self._durations) - count :].tolist()
