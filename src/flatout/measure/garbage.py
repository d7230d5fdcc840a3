"""The times at which Python's garbage collector ran, noted by `gc.callbacks`.

A collection stops every thread, in any lane. One callback serves all clocks, and is in
`gc.callbacks` only while one of them runs.
"""

from __future__ import annotations

import gc
import threading
from bisect import bisect_left
from time import perf_counter_ns
from typing import Any

_CAPACITY = 4096

_running: list[CollectorClock] = []
# Re-entrant: a collection inside start() or stop() may finalize a Timeline, which stops its clock.
_lock = threading.RLock()
_began: int | None = None


class CollectorClock:
    """Notes (begin, duration) in ns of every collection between `start()` and `stop()`."""

    def __init__(self) -> None:
        self.noted: list[tuple[int, int]] = []

    def start(self) -> None:
        with _lock:
            if self not in _running:
                _running.append(self)
            if _on_collection not in gc.callbacks:
                gc.callbacks.append(_on_collection)

    def stop(self) -> None:
        with _lock:
            if self in _running:
                _running.remove(self)
            if not _running and _on_collection in gc.callbacks:
                gc.callbacks.remove(_on_collection)

    def note(self, began: int, took: int) -> None:
        if len(self.noted) >= _CAPACITY:
            pairs = zip(self.noted[::2], self.noted[1::2], strict=True)
            self.noted[:] = [(first[0], first[1] + second[1]) for first, second in pairs]
        self.noted.append((began, took))

    def take_since(self, when: int) -> int:
        total = 0
        while self.noted and sum(self.noted[-1]) > when:
            total += self.noted.pop()[1]
        return total

    def take_before(self, when: int) -> list[tuple[int, int]]:
        # A collection may run at any allocation here, so it notes into a list of its own.
        noted, self.noted = self.noted, []
        count = bisect_left(noted, (when,))
        self.noted[:0] = noted[count:]
        return noted[:count]


def _on_collection(phase: str, info: dict[str, Any]) -> None:
    global _began
    if phase == "start":
        _began = perf_counter_ns()
    elif _began is not None:
        took = perf_counter_ns() - _began
        for clock in tuple(_running):
            clock.note(_began, took)
        _began = None
