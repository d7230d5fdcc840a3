"""Hands out parts of an epoch's batches to the workers that ask, each part once.

So a worker that is slow takes fewer of them, and no one waits for its share of the epoch. What a
worker has claimed and not used when it ends, others get.
"""

from __future__ import annotations

from collections import defaultdict, deque
from threading import Lock


class Handing:
    """What the first server knows of the parts that are claimed.

    Attributes:
        parts: as above.
    """

    def __init__(self, parts: int) -> None:
        self.parts = parts
        self._next = self._last = 0
        # Of each worker what it has claimed and not used, in that order; and what others get.
        self._held: defaultdict[int, deque[int]] = defaultdict(deque)
        self._back: deque[int] = deque()
        self._lock = Lock()

    def open(self, steps: int) -> None:
        """The parts of so many steps may be claimed."""
        with self._lock:
            self._next, self._last = 0, steps * self.parts
            self._held.clear()
            self._back.clear()

    def claim(self, worker: int) -> tuple[int, int]:
        """The number of the next part, and how many are left; -1 and the end where none is."""
        with self._lock:
            if self._back:
                number = self._back.popleft()
            elif self._next < self._last:
                number, self._next = self._next, self._next + 1
            else:
                return -1, self._last
            self._held[worker].append(number)
            return number, self._last - self._next + len(self._back)

    def used(self, worker: int, number: int) -> None:
        """A worker's gradient of a part has come: it and those claimed before are done with."""
        with self._lock:
            held = self._held[worker]
            while number in held:
                held.popleft()

    def give_back(self, worker: int) -> None:
        """A worker has ended: what it had claimed and not used is there for others."""
        with self._lock:
            self._back.extend(self._held.pop(worker, ()))

    def close(self) -> None:
        """End with the step of which parts were claimed: its other parts may still be."""
        with self._lock:
            self._last = min(self._last, -(-self._next // self.parts) * self.parts)

    def untaken(self) -> int:
        """How many parts of workers that have ended no other one has taken."""
        with self._lock:
            return len(self._back)
