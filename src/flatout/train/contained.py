"""Runs a function in a child process that can use only a limited amount of memory.

The child is a copy of this process (fork): the function reads the present model and data, and its
effects stay in the child. It runs in a new thread. OpenMP's threads are not in the copy, and the
thread that forks would wait for them; a new thread starts new ones. A process that has used a GPU
cannot use it in a child.
"""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch

from flatout.console import first_line
from flatout.errors import OutOfMemory
from flatout.processes import die_with_parent
from flatout.train.micro_batch import is_out_of_memory

SHARE = 0.9
"""Share of the free memory that a child may use; the rest is for needs beyond those of one step."""

MEMORY, TIME = "memory", "time"
"""Reasons why a child has not finished."""

# Bytes of a thread's stack if the system sets no limit (pthread_create(3)); the function uses
# little of the stack.
_STACK = 2 * 2**20


class Answer(NamedTuple):
    """A child's result.

    Attributes:
        value: the function's result, as plain data.
        why: the reason why there is no result: `MEMORY`, `TIME`, or the error in one line; "" if
            there is a result.
        is_told: whether the child itself has reported the result or error; False if the child ended
            without a report.
    """

    value: Any
    why: str = ""
    is_told: bool = True


class Child:
    """A child process that runs a function; it starts at once."""

    def __init__(self, run: Callable[[], Any], most: int | None = None) -> None:
        self._reads, writes = os.pipe()
        parent = os.getpid()
        with warnings.catch_warnings():
            # Python warns of locks that other threads hold: a child that waits for one is killed.
            warnings.simplefilter("ignore", DeprecationWarning)
            self._pid = os.fork()
        if self._pid == 0:
            os.close(self._reads)
            _be_child(run, most, writes, parent)
        os.close(writes)

    def result(self, timeout_s: float) -> Answer:
        """Wait for the child's answer at most this many seconds, then end the child."""
        deadline, data, is_late = time.monotonic() + timeout_s, b"", False
        while True:
            left = max(0.0, deadline - time.monotonic())
            if not select.select([self._reads], [], [], left)[0]:
                is_late = True
                break
            part = os.read(self._reads, 65_536)
            if not part:
                break
            data += part
        status = self.end()
        if data and not is_late:
            return Answer(*json.loads(data))
        if is_late:
            return Answer(None, TIME, is_told=False)
        # The kernel uses SIGKILL for processes that run out of memory.
        number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        why = MEMORY if number == signal.SIGKILL else _ended_words(status)
        return Answer(None, why, is_told=False)

    def end(self) -> int:
        """Kill the child if it still runs, and return its exit status."""
        with suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)
        os.close(self._reads)
        return os.waitpid(self._pid, 0)[1]


def _ended_words(status: int) -> str:
    if os.WIFSIGNALED(status):
        return f"ended by {signal.Signals(os.WTERMSIG(status)).name}"
    return f"ended with exit code {os.waitstatus_to_exitcode(status)}"


def _be_child(run: Callable[[], Any], most: int | None, writes: int, parent: int) -> NoReturn:
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C and kills this
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        die_with_parent(parent)
        with suppress(OSError):  # if memory runs out, the kernel kills this process first
            Path("/proc/self/oom_score_adj").write_text("1000")
        thread = threading.Thread(target=_report_result, args=(run, most, writes), daemon=True)
        thread.start()
        thread.join()
        code = 0
    finally:
        os._exit(code)


def _report_result(run: Callable[[], Any], most: int | None, writes: int) -> None:
    try:
        if most is not None:
            _limit(most)
        answer = (run(), "")
    except BaseException as error:
        is_memory = isinstance(error, OutOfMemory) or is_out_of_memory(error)
        answer = (None, MEMORY if is_memory else f"{type(error).__name__}: {first_line(error)}")
    data = memoryview(json.dumps(answer).encode())
    while data:
        data = data[os.write(writes, data) :]


def _limit(most: int) -> None:
    """Make allocations fail beyond this many bytes in addition to the present ones."""
    with open("/proc/self/status") as status:
        line = next(line for line in status if line.startswith("VmData"))
    stack = resource.getrlimit(resource.RLIMIT_STACK)[0]
    stack = _STACK if stack == resource.RLIM_INFINITY else stack
    wanted = int(line.split()[1]) * 1024 + most + stack * torch.get_num_threads()
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (wanted, hard))
