"""The identity and life of processes: their start, their parents and their orphans."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

_SET_DEATH_SIGNAL, _SET_SUBREAPER = 1, 36  # PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER of prctl(2)
_prctl = ctypes.CDLL(None).prctl
_TICK_NS = 1_000_000_000 // os.sysconf("SC_CLK_TCK")


def state_and_start(pid: int) -> tuple[str, int] | None:
    """Return a process' state, such as "Z", and its start in clock ticks since boot, or None.

    A later process with the same number has another start, even if the clock was set in between.
    https://man7.org/linux/man-pages/man5/proc_pid_stat.5.html.
    """
    try:
        fields = _stat(pid)
        return fields[0], int(fields[19])
    except (OSError, IndexError, ValueError):
        return None


def cpu_times_ns(pid: int) -> tuple[int, int]:
    """Return the CPU time of a process, and of its ended children; zeros once it has ended.

    In nanoseconds; the kernel counts ticks, mostly of 10 ms.
    """
    try:
        user, system, children_user, children_system = map(int, _stat(pid)[11:15])
        return (user + system) * _TICK_NS, (children_user + children_system) * _TICK_NS
    except (OSError, ValueError):
        return 0, 0


def _stat(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()


def children(pid: int) -> list[int]:
    """Return the running children of a process; none if the kernel does not list them."""
    result: list[int] = []
    with suppress(OSError):  # the process has ended
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children", encoding="ascii") as file:
                result += map(int, file.read().split())
    return result


def descendants(pid: int) -> list[int]:
    """Return the children of a process, their children, and so on."""
    return [item for child in children(pid) for item in (child, *descendants(child))]


def machine() -> str:
    """Return a name that is the same for processes that see each other in /proc."""
    named = socket.gethostname()
    with suppress(OSError):
        named += Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        named += os.readlink("/proc/self/ns/pid")
    return named


def die_with_parent(parent: int | None = None) -> None:
    """Let the system kill this process when the thread that has started it ends.

    Args:
        parent: the id of the parent; if that has ended already, this process is killed at once.
    """
    _prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)
    if parent is not None and os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def adopt_orphans(adopts: bool) -> None:
    """Set whether orphaned descendants become children of this process."""
    _prctl(_SET_SUBREAPER, int(adopts), 0, 0, 0)


def not_ignored(*numbers: signal.Signals) -> list[signal.Signals]:
    """Return the signals that this process does not ignore; nohup and a shell's `&` ignore some."""
    return [number for number in numbers if signal.getsignal(number) != signal.SIG_IGN]


@contextmanager
def asked_to_end(meet: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Call `meet` in the block for signals that ask this process to end. For the main thread."""
    heeded = not_ignored(signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    handlers = {number: signal.signal(number, meet) for number in heeded}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
