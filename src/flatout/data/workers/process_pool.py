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
from typing import Any

from flatout.data.batches.batch import Batch
from flatout.data.reading.threads import say_fewer
from flatout.data.workers.parallel import Ahead, Tuner
from flatout.data.workers.waiting import WaitStopped
from flatout.data.workers.worker import Worker, WorkerDied
from flatout.errors import DataError

# _OLD_S: seconds of age from which on processes are replaced. _OLD_STARTS: the same age as a
# multiple of the seconds of their start; the larger of both counts.
_OLD_S, _OLD_STARTS = 60.0, 20.0


class ProcessPool:
    """Processes that make batches, in order."""

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
        """Yield the batches `step` to `steps - 1`, each made from its task by a process."""
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
