"""What other processes take of the CPUs while something is measured: why times vary."""

from __future__ import annotations

import os
import time

import psutil

from flatout.words import rounded

_WORTH = 0.1
"""CPUs from which on other work is told."""


class OtherWork:
    """Counts CPU time of all processes but this one and those that it has started, from now on."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._before = _seconds()

    def words(self) -> str:
        """Who has taken most since then, and how much all have; "" where that is nothing."""
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
            continue  # it has ended, or may not be looked at
    return result


def _named(pid: int) -> str:
    try:
        return f"{psutil.Process(pid).name()} ({pid})"
    except psutil.Error:
        return f"process {pid}"
