"""Whether processes make batches faster than threads, and repay their start in this run."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic

# They begin only where they may save so many times that: the rest is for what is not foreseen.
_CERTAIN = 2.0
# How much faster they must be to be kept.
_WORTH = 1.03
# Batches and seconds in which they are judged, the first time; later it takes so many times longer.
_BATCHES, _SECONDS, _LONGER = 32, 1.0, 10.0


class Repay:
    """What a batch takes, made by threads and by processes.

    Args:
        start_s: the most seconds of their start: each imports the script and torch, and reads the
            data.

    Attributes:
        epochs: of the whole run; None where they are not known, and it may go on as long as it has.
        thread_s: seconds from one batch to the next in the latest epoch, made by threads.
        process_s: the same, made by processes, since they were last judged.
    """

    def __init__(self, clock: Callable[[], float] = monotonic, start_s: float = 8.0) -> None:
        self.epochs: int | None = None
        self.thread_s = 0.0
        self.process_s = 0.0
        self._clock, self._start_s = clock, start_s
        self._last: float | None = None
        self._seconds, self._batches = 0.0, 0
        self._needed = _SECONDS

    def begin(self) -> None:
        """An epoch begins, or processes have started: what came before does not count."""
        self._last = self._clock()

    def threads_made(self, batches: int) -> None:
        """So many batches were made by threads since the epoch began, and used."""
        if batches and self._last is not None:
            self.thread_s = (self._clock() - self._last) / batches

    def left(self, epoch: int) -> int:
        return epoch + 1 if self.epochs is None else max(0, self.epochs - epoch - 1)

    def may_pay(self, epoch: int, steps: int, waited: float, count: int) -> bool:
        """Whether so many processes may repay their start in the epochs after this one."""
        saved = self.left(epoch) * steps * self.thread_s * min(waited, 1 - 1 / count)
        return saved > _CERTAIN * self._start_s

    def process_made(self) -> None:
        """One more batch was made by the processes, and the one before it used."""
        now = self._clock()
        if self._last is not None:
            self._seconds += now - self._last
            self._batches += 1
        self._last = now

    def loses(self) -> bool:
        """Whether the processes were measured, and are not faster than the threads were."""
        if self._batches < _BATCHES or self._seconds < self._needed:
            return False
        self.process_s = self._seconds / self._batches
        self._seconds, self._batches, self._needed = 0.0, 0, _SECONDS * _LONGER
        return self.process_s * _WORTH > self.thread_s
