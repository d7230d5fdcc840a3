"""CPU time of a script and all that it has started: what other processes do does not change it."""

from __future__ import annotations

import os
import resource
import time

from flatout.processes import cpu_times_ns, descendants


def cpu_ns() -> int:
    """Nanoseconds that this process, its threads and those below it have computed so far.

    Of live children the kernel counts in ticks of 10 ms. Where it does not list them, or not at
    all, they are left out.
    """
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    own = time.process_time_ns() + int((ended.ru_utime + ended.ru_stime) * 1e9)
    return own + sum(sum(cpu_times_ns(pid)) for pid in descendants(os.getpid()))
