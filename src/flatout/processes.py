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


def state_and_start(pid: int) -> tuple[str, int] | None:
    """A process' state, such as "Z", and when it was started, in clock ticks since boot.

    Both tell it from a later one of the same number, also where the clock was set meanwhile; None
    where there is none to be seen. https://man7.org/linux/man-pages/man5/proc_pid_stat.5.html.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return fields[0], int(fields[19])
    except (OSError, IndexError, ValueError):
        return None


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


@contextmanager
def asked_to_end(meet: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Within, the signals that ask this process to end go to `meet`. For the main thread."""
    asking = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    # Under nohup a hang-up is none.
    kept = [n for n in asking if n != signal.SIGHUP or signal.getsignal(n) != signal.SIG_IGN]
    handlers = {number: signal.signal(number, meet) for number in kept}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
