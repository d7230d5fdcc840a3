"""Hands out parts of an epoch's batches to the workers that ask, each part once.

So a worker that is slow takes fewer of them, and no one waits for its share of the epoch.
"""

from __future__ import annotations

from threading import Lock


class Handing:
    """What the first server knows of the parts that are claimed.

    Args:
        workers: how many there are: as many parts a step has.
    """

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._next = self._last = 0
        self._lock = Lock()

    def open(self, steps: int) -> None:
        """The parts of so many steps may be claimed."""
        with self._lock:
            self._next, self._last = 0, steps * self._workers

    def claim(self) -> tuple[int, int]:
        """The number of the next part, and how many are left; -1 and the end where none is."""
        with self._lock:
            if self._next >= self._last:
                return -1, self._last
            self._next += 1
            return self._next - 1, self._last - self._next

    def close(self) -> None:
        """End with the step of which parts were claimed: its other parts may still be."""
        with self._lock:
            self._last = min(self._last, -(-self._next // self._workers) * self._workers)
