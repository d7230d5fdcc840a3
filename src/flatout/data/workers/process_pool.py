"""Batches made by fresh processes, for user's Python code that threads cannot run in parallel.

Processes are replaced between epochs, so that memory leaks of a user's code do not add up.
"""

from __future__ import annotations

import pickle
import sys
import time
from collections.abc import Callable, Generator
from contextlib import closing, suppress
from pathlib import Path
from queue import SimpleQueue
from time import monotonic
from typing import Any

from flatout.data.batches.batch import Batch
from flatout.data.reading.threads import say_fewer
from flatout.data.workers.parallel import Ahead, Tuner
from flatout.data.workers.waiting import WaitStopped
from flatout.data.workers.worker import Worker, WorkerDied
from flatout.errors import DataError

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


# _OLD_S: seconds of age from which on processes are replaced. _OLD_STARTS: the same age as a
# multiple of the seconds of their start; the larger of both counts.
_OLD_S, _OLD_STARTS = 60.0, 20.0


class ProcessPool:
    def __init__(self, maker: Any, count: int) -> None:
        self.count = count
        self._payload = pickle.dumps(maker)
        self._workers: list[Worker] = []
        self._idle: SimpleQueue[Worker] = SimpleQueue()
        self._since = 0.0
        self._start_s = 0.0

    @property
    def pids(self) -> list[int | None]:
        return [worker.pid for worker in self._workers]

    @property
    def started(self) -> bool:
        return bool(self._workers) and all(worker.ready for worker in self._workers)

    def batches(
        self,
        task: Callable[[int], tuple[Any, ...]],
        step: int,
        steps: int,
        most: Callable[[], int] | None = None,
    ) -> Generator[Batch, None, None]:
        idle = self._started()

        def make(at: int) -> Batch:
            worker = idle.get()
            starting = not worker.ready
            try:
                return worker.ask(task(at), f"making batch {at:,}")
            finally:
                if starting:
                    self._start_s = time.monotonic() - self._since
                idle.put(worker)

        tuner = Tuner(self.count, threads=self.count, depth=2 * self.count + 1)
        try:
            with closing(iter(Ahead(make, step, steps, tuner, most=most))) as made:
                yield from made
        except (WorkerDied, WaitStopped):
            self.close()
            raise

    def _started(self) -> SimpleQueue[Worker]:
        old = max(_OLD_S, _OLD_STARTS * self._start_s)
        if self._workers and time.monotonic() - self._since > old:
            self.close()
        if not self._workers:
            self._start_workers()
        return self._idle

    def _start_workers(self) -> None:
        self._idle = SimpleQueue()
        self._since = time.monotonic()
        try:
            for number in range(self.count):
                name = f"worker process {number + 1} of {self.count}"
                self._workers.append(Worker(self._payload, name))
                self._idle.put(self._workers[-1])
        except DataError as error:
            if not self._workers:
                raise
            self.count = len(self._workers)
            say_fewer(error.what, f"batches are made by {self.count} processes")
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        workers, self._workers = self._workers, []
        for worker in workers:
            worker.close()


def refusal(maker: Any) -> str:
    """Return why processes cannot make these batches, or ""."""
    try:
        pickle.dumps(maker)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        return f"{error}; define the function at the top of a module"
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    if main is not None and Path(main).suffix == ".py":
        with suppress(OSError, UnicodeDecodeError):
            # A spawned process imports the main script; without the guard, it would also start to
            # train.
            if "__name__" not in Path(main).read_text():
                return 'the script has no `if __name__ == "__main__":`'
    return ""
