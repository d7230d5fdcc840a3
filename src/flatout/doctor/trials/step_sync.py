"""A trial's process at a step boundary: reports the time of its block, and waits for the next.

The code that detects optimizer steps calls `at_step()` after each step, or after the returned
number of steps. Outside a trial the call does nothing. The first process of a script that calls
`at_step()` takes part in the trial. Other ranks and workers of the script wait for that process by
their usual means. If the script ends within a block, it reports its number of steps.
"""

from __future__ import annotations

import atexit
import json
import os
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from time import perf_counter_ns
from typing import Any

from flatout.doctor.trials.cpu_time import cpu_ns
from flatout.measure import finish_device, page_faults

# Variable with the folder in which the trial listens on a Unix socket. A socket with a path can be
# reached from within the script's own network.
VARIABLE = "FLATOUT_BATON"
_SOCKET = "steps"
RECORDED = "FLATOUT_RECORDED"
"""Variable with the number of steps and batches that a process records, not only times."""
# Number of steps to the next action if no action is planned.
_NEVER = 2**40


class StepSync:
    """The end of the connection in the script's process."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._lines = connection.makefile("r", encoding="ascii")
        self._pid = os.getpid()
        self._done = 0
        # Step numbers of actions: the block's clock starts at `_first` and stops at `_last`.
        # Before the first block, both are the script's first step.
        self._first = self._last = self._next = 1
        self._began = self._resumed = self._between = self._faults = self._cpu = 0
        atexit.register(self._end)

    def step(self, steps: int) -> int:
        """Count ended steps; return when the next step may begin, with the result of `at_step`."""
        if os.getpid() != self._pid:
            return _NEVER
        self._done += steps
        if self._done >= self._next:
            self._act()
        return self._next - self._done

    def _act(self) -> None:
        finish_device()
        now = perf_counter_ns()
        if self._done == self._first < self._last:
            self._began, self._next = now, self._last
            self._between, self._faults, self._cpu = _between(), page_faults(), cpu_ns()
            return
        steps = self._last - self._first
        times = {"resumed": self._resumed, "began": self._began, "ended": now}
        spent = {
            "between": _between() - self._between,
            "faults": page_faults() - self._faults,
            "cpu": cpu_ns() - self._cpu,
        }
        message: dict[str, Any] = (
            {"steps": steps, "done": self._done, **times, **spent}
            if steps
            else {"queue": _queued_batches(), "pid": self._pid}
        )
        self._connection.sendall(json.dumps(message | _more()).encode() + b"\n")
        self._wait()

    def _wait(self) -> None:
        line = self._lines.readline()
        if not line:  # the trial has ended
            os._exit(0)
        dropped, steps = map(int, line.split())
        self._first = self._next = self._done + dropped
        self._last = self._first + steps
        self._resumed = perf_counter_ns()

    def _end(self) -> None:
        if os.getpid() != self._pid:
            return
        steps = self._done if _steps is None else _steps()
        with suppress(OSError):  # the trial has ended
            self._connection.sendall(json.dumps({"steps_at_all": steps}).encode() + b"\n")


def listen(folder: str) -> socket.socket:
    """Return a socket to which the script connects that knows this folder."""
    listener = socket.socket(socket.AF_UNIX)
    with _short(folder) as path:
        listener.bind(path)
    listener.listen(1)
    return listener


@contextmanager
def _short(folder: str) -> Iterator[str]:
    descriptor = os.open(folder, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{descriptor}/{_SOCKET}"
    finally:
        os.close(descriptor)


_step_sync: StepSync | None = None
_is_asked = False
_between: Callable[[], int] = lambda: 0  # noqa: E731
_more: Callable[[], dict[str, Any]] = dict
_steps: Callable[[], int] | None = None


def tell_also(
    between: Callable[[], int],
    more: Callable[[], dict[str, Any]],
    steps: Callable[[], int] | None = None,
) -> None:
    """Set functions whose results are reported with each block."""
    global _between, _more, _steps
    _between, _more, _steps = between, more, steps


def at_step(steps: int = 1) -> int:
    """Report ended optimizer steps; return the number of steps until the next call is due.

    Call this before the next step's work begins.
    """
    if _step_sync is None and not _is_asked:
        _join()
    return _NEVER if _step_sync is None else _step_sync.step(steps)


def _join() -> None:
    global _step_sync, _is_asked
    _is_asked = True
    folder = os.environ.get(VARIABLE)
    if folder is None or os.environ.get("RANK", "0") != "0":
        return
    connection = socket.socket(socket.AF_UNIX)
    try:
        with _short(folder) as path:
            connection.connect(path)
    except OSError:  # another process of this script has connected already
        connection.close()
        return
    _step_sync = StepSync(connection)


def _queued_batches() -> int:
    loader = sys.modules.get("torch.utils.data.dataloader")
    if loader is None:
        return 0
    import gc

    kind = loader._MultiProcessingDataLoaderIter
    is_frozen = gc.get_freeze_count() > 0
    if is_frozen:  # script.garbage freezes objects, and gc does not list them
        gc.unfreeze()
    # The exact types, since isinstance asks a proxy for its referent, which may be gone.
    alive = [item for item in gc.get_objects() if issubclass(type(item), kind)]
    if is_frozen:  # newer objects are frozen too, so their cycles stay
        gc.freeze()
    return max((item._num_workers * (item._prefetch_factor or 1) for item in alive), default=0)
