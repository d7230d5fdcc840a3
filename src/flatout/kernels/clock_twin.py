"""The clock in Python, for where the C extension is absent."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from threading import get_ident
from time import perf_counter_ns

INPUT, COPY, FORWARD, BACKWARD, SYNC, OPTIMISER, HOST, EVALUATION, SAVING, GC, IDLE = range(11)
# From a backward pass to what comes next: the optimiser's or, in accumulation, the host's.
AFTER = 11
_COUNT = 12
# Durations of single steps that are kept.
KEPT = 20_000


class Clock:
    """The clock of a training loop: it always runs for one of the lanes, at first the host's.

    Called again on the same clock, `__init__` begins anew.

    Attributes:
        thread: whose clock it is: the calling one's at first.
        last: when it was looked at, as `time.perf_counter_ns` says.
        began: when the step that is open began.
        current: the lane for which it runs.
        steps: how many have ended.
        backwards: backward passes since the last step.
        between: nanoseconds of evaluation and saving until the last step ended.
        is_inside: whether a model is being called.
    """

    __slots__ = (
        "_after",
        "_durations",
        "_first",
        "_spent",
        "backwards",
        "began",
        "between",
        "current",
        "is_inside",
        "last",
        "steps",
        "thread",
    )

    def __init__(self) -> None:
        self._spent = [0] * _COUNT
        self._first = [0] * _COUNT
        self._durations = array("q")
        self._after = self.between = 0  # of those lanes, when the last step ended
        self.steps = self.backwards = 0
        self.is_inside = False
        self.current = HOST
        self.thread = get_ident()
        self.last = self.began = perf_counter_ns()

    @property
    def spent(self) -> list[int]:
        """Nanoseconds by lane, in a list of their own. It can be set."""
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

    def lap(self, merge: bool, /) -> None:
        """A step has ended when last looked; with `merge` it is still the one that ended last."""
        spent = self._spent
        between = spent[EVALUATION] + spent[SAVING]
        took = self.last - self.began - (between - self.between)
        self.began = self.last
        self.between = between
        if self.backwards > 1:  # what lay between them was the host's
            spent[HOST] += spent[AFTER] - self._after
            spent[AFTER] = self._after
        self._after = spent[AFTER]
        self.backwards = 0
        if merge and self.steps:
            self._durations[-1] += took
        else:
            self._durations.append(took)
            self.steps += 1
        if self.steps == 1:
            self._first = spent[:]
        elif len(self._durations) > 2 * KEPT:
            del self._durations[:KEPT]

    def step_ns(self) -> list[int]:
        """Durations of the latest steps, oldest first, without evaluation and saving."""
        return self._durations[-KEPT:].tolist()
