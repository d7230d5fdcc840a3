"""Threads, the CPUs they run on, and their handling of denormal numbers."""

from __future__ import annotations

import os
from collections.abc import Iterable

from flatout.errors import DeviceError
from flatout.measure import usable_cpus

__all__ = [
    "affinity",
    "check_count",
    "flush_denormals",
    "given_affinity",
    "reset_affinity",
    "set_affinity",
    "set_interop_threads",
    "set_threads",
    "usable_cpus",
]

# Elements that split an elementwise operator over all threads: torch's grain is 32,768.
_SPLIT_OVER_ALL = 65_536

_first_affinity: set[int] | None = None
_bound_to: set[int] | None = None


def check_count(name: str, count: int) -> None:
    """Refuse more threads or processes than any job here can use, which would end a process.

    Raises:
        DeviceError: naming the setting and the CPUs of this machine.
    """
    cpus = os.cpu_count() or 1
    most = max(256, 16 * cpus)
    if count > most:
        raise DeviceError(
            f"{name} asks for {count:,}, and this machine has {cpus:,} CPUs",
            do=f"ask for at most {most:,}, or leave it to auto",
        )


def set_threads(count: int) -> int:
    """Set the number of threads inside one operator, and return the previous number."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(count)
    return before


def set_interop_threads(count: int) -> bool:
    """Set the number of threads that run operators in parallel, and return whether it succeeded.

    This is possible once per process, and only before operators first run in parallel.
    """
    import torch

    if torch.get_num_interop_threads() == count:
        return True
    try:
        torch.set_num_interop_threads(count)
    except RuntimeError:
        return False
    return True


def affinity() -> set[int]:
    """Return the CPUs that this process may run on."""
    return os.sched_getaffinity(0)


def given_affinity() -> set[int]:
    """Return the CPUs that this process had before `set_affinity`.

    If other code has changed the binding since, return the present CPUs. A restarted process
    has its first CPUs here, while other ranks are already bound to their parts.
    """
    now = affinity()
    return _first_affinity if _first_affinity is not None and now == _bound_to else now


def set_affinity(cpus: Iterable[int]) -> set[int]:
    """Bind all threads of this process to some CPUs, and return the previous CPUs.

    Later threads and processes inherit the binding.

    Raises:
        DeviceError: the list is empty, or names a CPU that this process cannot have.
    """
    global _first_affinity, _bound_to
    wanted, before = set(cpus), affinity()
    _bind(wanted)
    # The kernel drops missing CPUs, and those withheld by a cpuset, if any CPU is left.
    if lacking := wanted - affinity():
        _bind(before)
        raise _no_such_cpus(lacking)
    if _first_affinity is None:
        _first_affinity = before
    _bound_to = wanted
    return before


def reset_affinity() -> None:
    """Restore the CPUs that the process had before the first `set_affinity`."""
    if _first_affinity is not None:
        _bind(_first_affinity)


def _bind(cpus: set[int]) -> None:
    bound: set[str] = set()
    while starting := set(os.listdir("/proc/self/task")) - bound:
        for thread in starting:
            try:
                os.sched_setaffinity(int(thread), cpus)
            except ProcessLookupError:
                pass  # the thread has ended
            except (OSError, OverflowError, ValueError):
                raise _no_such_cpus(cpus) from None
        bound |= starting


def _no_such_cpus(cpus: set[int]) -> DeviceError:
    names = ", ".join(map(str, sorted(cpus))) or "an empty list of CPUs"
    return DeviceError(
        f"this process cannot be bound to CPU {names}; it runs on "
        f"{', '.join(map(str, sorted(affinity())))}",
        where="process.affinity",
        do="name CPUs that are there and that the container or job scheduler gave to this process",
    )


def flush_denormals(on: bool) -> bool:
    """Set whether arithmetic treats denormal numbers as zero; return whether all threads comply.

    The setting belongs to each thread, and a thread inherits it when it starts: it must come before
    the first parallel operator. A trial on denormal numbers shows whether it was in time. It uses
    an operator that runs on all threads, and thus starts them.
    """
    import torch

    if not torch.set_flush_denormal(on):
        return False
    # Written as bits and counted as bits: a denormal compared as a number may count as zero.
    count = _SPLIT_OVER_ALL * torch.get_num_threads()
    tiny = torch.full((count,), 1, dtype=torch.int32).view(torch.float32)
    left = int(torch.count_nonzero(torch.mul(tiny, 1.0).view(torch.int32)))
    return left == (0 if on else count)
