"""Batches made by fresh processes, for a user's Python that threads cannot share.

Processes are spawned, never forked: a fork after a parallel operation hangs in OpenMP. They are
replaced between epochs, so that what a user's code leaks does not add up.
"""

from __future__ import annotations

import os
import pickle
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from flatout.data.batch import Batch
from flatout.errors import DataError

# An epoch shorter than this keeps its processes: starting them costs seconds.
_OLD_S = 60.0

_maker: Any = None


class Crew:
    """Processes that make batches, in order.

    Args:
        maker: a `program.Maker`, which is sent to each.
        count: how many processes.
    """

    def __init__(self, maker: Any, count: int) -> None:
        self.count = count
        self._payload = pickle.dumps(maker)
        self._pool: ProcessPoolExecutor | None = None
        self._since = 0.0
        self.rate = 0.0  # batches a second in the latest epoch, once the processes had started

    def batches(
        self, task: Callable[[int], tuple[Any, ...]], step: int, steps: int
    ) -> Iterator[Batch]:
        """The batches `step` to `steps - 1`, each made of its task by one of the processes."""
        pool = self._hired()
        coming: deque[Future[Batch]] = deque()
        taken, start = 0, time.monotonic()
        try:
            while step < steps or coming:
                while step < steps and len(coming) < 2 * self.count + 1:
                    coming.append(pool.submit(_make, *task(step)))
                    step += 1
                yield coming.popleft().result()
                taken += 1
                if taken == self.count:
                    start = time.monotonic()
            if taken > self.count:
                self.rate = (taken - self.count) / max(1e-9, time.monotonic() - start)
        except BrokenProcessPool as error:
            self.close()
            raise DataError(
                "a process that makes batches has died: killed, out of memory, or crashed",
                do="look at what it printed; options(processes=...) sets how many there are",
            ) from error
        finally:
            for future in coming:
                future.cancel()

    def _hired(self) -> ProcessPoolExecutor:
        if self._pool is not None and time.monotonic() - self._since > _OLD_S:
            self.close()
        if self._pool is None:
            context = torch.multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(
                self.count, mp_context=context, initializer=_install, initargs=(self._payload,)
            )
            self._since = time.monotonic()
        return self._pool

    def close(self) -> None:
        """End the processes."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(wait=False, cancel_futures=True)


def refusal(maker: Any) -> str:
    """Why processes cannot make these batches, or ""."""
    try:
        pickle.dumps(maker)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        return f"{error}; define the function at the top of a module"
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    if main is not None and Path(main).suffix == ".py":
        with suppress(OSError, UnicodeDecodeError):
            # A spawned process imports the main script; without the guard it would train as well.
            if "__name__" not in Path(main).read_text():
                return 'the script has no `if __name__ == "__main__":`'
    return ""


def _install(payload: bytes) -> None:
    global _maker
    threading.Thread(target=_end_with_parent, name="flatout-parent", daemon=True).start()
    torch.set_num_threads(1)
    _maker = pickle.loads(payload)


def _end_with_parent() -> None:
    """One that is killed tells nobody, and its processes would wait for work for ever."""
    parent = torch.multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _make(*task: Any) -> Batch:
    made: Batch = _maker.seeded(*task)
    return made
