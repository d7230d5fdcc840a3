"""CPU time that other processes take during measurements, a cause of noise."""

from __future__ import annotations

import os
import time

import psutil

from flatout.words import rounded

_WORTH = 0.1
"""Minimum number of CPUs taken by other processes that is reported."""


class OtherWork:
    """Counts CPU time of all processes except this one and its children, from now on."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._before = _seconds()

    def words(self) -> str:
        """Return which process took most CPU time, and the total; "" if that is negligible."""
        wall = max(time.monotonic() - self._began, 1e-3)
        ours = {process.pid for process in psutil.Process().children(recursive=True)}
        took = {
            pid_and_start: seconds - self._before.get(pid_and_start, 0.0)
            for pid_and_start, seconds in _seconds().items()
            if pid_and_start[0] not in ours | {os.getpid()}
        }
        cpus = sum(took.values()) / wall
        if cpus < _WORTH:
            return ""
        pid, _ = max(took, key=lambda value: took[value])
        return (
            f"other processes took {rounded(cpus, 2)} CPUs during trials, most of it {_named(pid)}"
        )


def _seconds() -> dict[tuple[int, float], float]:
    result = {}
    for process in psutil.process_iter():
        try:
            times = process.cpu_times()
            result[process.pid, process.create_time()] = times.user + times.system
        except psutil.Error:
            continue  # the process has ended, or this one may not inspect it
    return result


def _named(pid: int) -> str:
    try:
        return f"{psutil.Process(pid).name()} ({pid})"
    except psutil.Error:
        return f"process {pid}"
