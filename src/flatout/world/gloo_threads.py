"""Gloo's threads at the end of a process.

Such a thread lets go of a collective's tensors some time after everyone has its result, and takes
the GIL to do so. If the interpreter ends at that moment, the thread is ended within C++ that must
not be left, and the whole process is aborted ("terminate called without an active exception"): a
rank that has done all its work fails.
"""

from __future__ import annotations

from pathlib import Path
from time import monotonic, sleep

_NAME = "pt_gloo_runloop"
# Checks in a row that must find the threads asleep, and seconds before each check.
_TIMES, _EVERY_S = 3, 0.002


def wait_until_idle(tasks: Path = Path("/proc/self/task"), longest_s: float = 2.0) -> None:
    """Wait until no thread of gloo has work left, at most `longest_s` seconds.

    Returns after a moment if the system does not show the threads.
    """
    until, times = monotonic() + longest_s, 0
    while times < _TIMES and monotonic() < until:
        sleep(_EVERY_S)  # without the GIL
        times = times + 1 if _are_idle(tasks) else 0


def _are_idle(tasks: Path) -> bool:
    return not tasks.is_dir() or all(_is_idle(task) for task in list(tasks.iterdir()))


def _is_idle(task: Path) -> bool:
    try:
        if (task / "comm").read_text().strip() != _NAME:
            return True
        state = (task / "stat").read_text().rpartition(")")[2].split()[0]
    except OSError:  # the thread has ended
        return True
    return state == "S"
