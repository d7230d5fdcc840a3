"""Timer of the user's lines by Python's tracing, used for short intervals since tracing is slow."""

from __future__ import annotations

import sys
from collections import Counter
from time import perf_counter_ns
from types import FrameType
from typing import Any

from flatout.observe.sites import is_users

# Total nanoseconds after which the timing ends early.
_LONGEST_NS = 200_000_000


class LineClock:
    """Timer of lines of the user's code in one thread, with the library code that they call.

    Attributes:
        ns: nanoseconds of each line, by file and line number, without the user's lines that the
            line calls.
        whole_ns: nanoseconds from start to stop, without the time of the clock itself.
    """

    def __init__(self) -> None:
        self.ns: Counter[tuple[str, int]] = Counter()
        self.whole_ns = 0
        self._is_over = False
        self._lines: list[tuple[str, int]] = []
        self._last = 0

    def start(self) -> None:
        """Time the lines of each function that this thread calls from now on."""
        self._last = perf_counter_ns()
        sys.settrace(self._call)

    def stop(self) -> None:
        """Stop the timing."""
        if not self._is_over:
            self._end()

    def _end(self) -> None:
        sys.settrace(None)
        self._spend()
        self._is_over = True

    def _call(self, frame: FrameType, event: str, arg: Any) -> Any:
        file = frame.f_code.co_filename
        if not is_users(file):
            return None
        self._spend()
        self._lines.append((file, frame.f_lineno))
        self._last = perf_counter_ns()
        return self._step

    def _step(self, frame: FrameType, event: str, arg: Any) -> Any:
        if self._is_over:
            return None  # a generator that began while the clock ran
        self._spend()
        if event == "return":
            self._lines.pop()
        elif event == "line":
            self._lines[-1] = (frame.f_code.co_filename, frame.f_lineno)
        if self.whole_ns > _LONGEST_NS:
            self._end()
        self._last = perf_counter_ns()
        return self._step

    def _spend(self) -> None:
        spent = perf_counter_ns() - self._last
        self.whole_ns += spent
        if self._lines:
            self.ns[self._lines[-1]] += spent
