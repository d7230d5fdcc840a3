"""CPU time of a script and all that it has started: what other processes do does not change it."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Iterator
from contextlib import suppress

_TICK_NS = 1_000_000_000 // os.sysconf("SC_CLK_TCK")


def cpu_ns() -> int:
    """Nanoseconds that this process, its threads and those below it have computed so far.

    Of live children the kernel counts in ticks of 10 ms. Where it does not list them, or not at
    all, they are left out.
    """
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    own = time.process_time_ns() + int((children.ru_utime + children.ru_stime) * 1e9)
    return own + sum(map(_of, _below(os.getpid())))


def _below(pid: int) -> Iterator[int]:
    """The processes that a process has started, and theirs."""
    with suppress(OSError, ValueError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children", encoding="ascii") as file:
                for child in map(int, file.read().split()):
                    yield child
                    yield from _below(child)


def _of(pid: int) -> int:
    with suppress(OSError, ValueError, IndexError):
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            # Its name may have spaces and brackets.
            fields = file.read().rpartition(")")[2].split()
        return sum(map(int, fields[11:15])) * _TICK_NS
    return 0
