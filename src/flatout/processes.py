"""How long processes live: which one it is, with whom it ends, whose orphans it takes."""

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
    """A process' state, such as "Z", and when it was started, in clock ticks since boot.

    A later one of its number has others, also where the clock was set meanwhile; None
    where there is none to be seen. https://man7.org/linux/man-pages/man5/proc_pid_stat.5.html.
    """
    try:
        fields = _stat(pid)
        return fields[0], int(fields[19])
    except (OSError, IndexError, ValueError):
        return None


def cpu_times_ns(pid: int) -> tuple[int, int]:
    """CPU time of a process, and of those of its children that have ended; zeros once it has ended.

    In nanoseconds, of which the kernel counts ticks, mostly of 10 ms.
    """
    try:
        user, system, children_user, children_system = map(int, _stat(pid)[11:15])
        return (user + system) * _TICK_NS, (children_user + children_system) * _TICK_NS
    except (OSError, ValueError):
        return 0, 0


def _stat(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()


def children(pid: int) -> list[int]:
    """The processes that a process has started and that run; none where the kernel lists none."""
    result: list[int] = []
    with suppress(OSError):  # it has ended
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children", encoding="ascii") as file:
                result += map(int, file.read().split())
    return result


def descendants(pid: int) -> list[int]:
    """Its children, theirs, and so on."""
    return [item for child in children(pid) for item in (child, *descendants(child))]


def machine() -> str:
    """The same for processes that see one another in /proc."""
    named = socket.gethostname()
    with suppress(OSError):
        named += Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        named += os.readlink("/proc/self/ns/pid")
    return named


def die_with_parent(parent: int | None = None) -> None:
    """Let the system kill this process when the thread that has started it ends.

    Args:
        parent: its number; this process is killed at once where that one has ended already.
    """
    _prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)
    if parent is not None and os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def adopt_orphans(adopts: bool) -> None:
    """Whether what descendants leave without a parent becomes a child of this process."""
    _prctl(_SET_SUBREAPER, int(adopts), 0, 0, 0)


def not_ignored(*numbers: signal.Signals) -> list[signal.Signals]:
    """Return the signals that this process does not ignore; nohup and a shell's `&` ignore some."""
    return [number for number in numbers if signal.getsignal(number) != signal.SIG_IGN]


@contextmanager
def asked_to_end(meet: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Within, the signals that ask this process to end go to `meet`. For the main thread."""
    heeded = not_ignored(signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    handlers = {number: signal.signal(number, meet) for number in heeded}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
