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
_TASKS = Path("/proc/self/task")
# They are idle if they sleep so often in a row, looked at after so many seconds each.
_TIMES, _EVERY_S = 3, 0.002
_LONGEST_S = 2.0


def wait_until_idle() -> None:
    """Until none of them has anything left to do; where that cannot be seen, for a moment."""
    until, times = monotonic() + _LONGEST_S, 0
    while times < _TIMES and monotonic() < until:
        sleep(_EVERY_S)  # without the GIL
        times = times + 1 if _are_idle() else 0


def _are_idle() -> bool:
    tasks = list(_TASKS.iterdir()) if _TASKS.is_dir() else []
    return all(_is_idle(task) for task in tasks)


def _is_idle(task: Path) -> bool:
    try:
        if (task / "comm").read_text().strip() != _NAME:
            return True
        state = (task / "stat").read_text().rpartition(")")[2].split()[0]
    except OSError:  # it has ended
        return True
    return state == "S"
