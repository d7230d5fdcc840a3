"""CPU time of a script and its children, which other processes hardly change."""

from __future__ import annotations

import os
import resource
import time

from flatout.processes import cpu_times_ns, descendants


def cpu_ns() -> int:
    """Return the CPU nanoseconds of this process, its threads and its descendants so far.

    The kernel counts live children in ticks of 10 ms. Children that the kernel does not list are
    left out.
    """
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    own = time.process_time_ns() + int((ended.ru_utime + ended.ru_stime) * 1e9)
    return own + sum(sum(cpu_times_ns(pid)) for pid in descendants(os.getpid()))
