"""The clock in Python, for where the C extension is absent."""

from __future__ import annotations

from threading import get_ident
from time import perf_counter_ns


class Clock:
    """A clock that always runs for one of its lanes.

    Args:
        lanes: how many.
        current: the one for which it begins to run. Called again on the same clock, `__init__`
            begins anew, with the same list `spent`.

    Attributes:
        spent: nanoseconds by lane; always the same list.
        thread: whose clock it is: the calling one's at first.
        last: when it was looked at, as `time.perf_counter_ns` says.
        current: the lane for which it runs.
    """

    __slots__ = ("current", "last", "spent", "thread")

    def __init__(self, lanes: int, current: int) -> None:
        if not 0 <= current < lanes:
            raise IndexError("no such lane")
        if not hasattr(self, "spent"):
            self.spent: list[int] = []
        self.spent[:] = [0] * lanes
        self.current = current
        self.thread = get_ident()
        self.last = perf_counter_ns()

    def switch(self, lane: int, /) -> int:
        """The time since the last look goes to the lane that ran; returns that one.

        Raises:
            IndexError: there is no such lane.
        """
        if not 0 <= lane < len(self.spent):
            raise IndexError("no such lane")
        now = perf_counter_ns()
        before = self.current
        self.spent[before] += now - self.last
        self.last = now
        self.current = lane
        return before

    def enter(self, lane: int, /) -> int:
        """As `switch`, in the thread of the clock; in another one nothing happens, and -1."""
        return self.switch(lane) if get_ident() == self.thread else -1
