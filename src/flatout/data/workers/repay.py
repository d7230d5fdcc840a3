"""Decides whether processes make batches faster than threads, and repay their start in this run."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic

# Processes start only if they may save this many times the seconds of their start, since the
# estimate is uncertain.
_CERTAIN = 2.0
# Smallest speedup over threads for which processes are used further.
_WORTH = 1.03
# _BATCHES, _SECONDS: minimum number of batches and seconds after which processes are first compared
# with threads. _LONGER: factor on _SECONDS for all later comparisons.
_BATCHES, _SECONDS, _LONGER = 32, 1.0, 10.0


class Repay:
    """Seconds per batch, made by threads and by processes.

    Args:
        start_s: maximum seconds that the start of processes takes: each imports the script and
            torch, and reads the data.

    Attributes:
        epochs: number of epochs of the whole run. None if not known: the remaining run is then
            expected to last as long as the run so far.
        thread_s: seconds from one batch to the next in the latest epoch, made by threads.
        process_s: seconds from one batch to the next, made by processes, at the latest comparison.
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
        """Start timing, as an epoch begins or processes have started."""
        self._last = self._clock()

    def threads_made(self, batches: int) -> None:
        """Record that threads made `batches` batches, all used, since the epoch began."""
        if batches and self._last is not None:
            self.thread_s = (self._clock() - self._last) / batches

    def left(self, epoch: int) -> int:
        return epoch + 1 if self.epochs is None else max(0, self.epochs - epoch - 1)

    def may_pay(self, epoch: int, steps: int, waited: float, count: int) -> bool:
        """Return whether `count` processes may repay their start in the epochs after this one."""
        saved = self.left(epoch) * steps * self.thread_s * min(waited, 1 - 1 / count)
        return saved > _CERTAIN * self._start_s

    def process_made(self) -> None:
        """Record that the processes made one more batch, and that the batch before it was used."""
        now = self._clock()
        if self._last is not None:
            self._seconds += now - self._last
            self._batches += 1
        self._last = now

    def loses(self) -> bool:
        """Return whether the processes were measured, and are not faster than the threads were."""
        if self._batches < _BATCHES or self._seconds < self._needed:
            return False
        self.process_s = self._seconds / self._batches
        self._seconds, self._batches, self._needed = 0.0, 0, _SECONDS * _LONGER
        return self.process_s * _WORTH > self.thread_s
