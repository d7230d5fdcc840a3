"""The activity of a rank's process: its Python stack, asked from within or from outside."""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from flatout.processes import machine, state_and_start

# _SIGNAL: the signal on which a process writes its stacks, whichever thread holds the interpreter.
# _WRITES_WITHIN_S: maximum seconds until it has written them.
_SIGNAL = signal.SIGRTMAX - 5
_WRITES_WITHIN_S = 1.0
_STATES = {
    "T": "is stopped (SIGSTOP, or Ctrl-Z)",
    "t": "is stopped by a debugger",
    "D": "waits in the kernel, for a disk, a network file system or a driver",
    "R": "computes",
    "S": "sleeps, or waits for a lock, a file or a network",
    "Z": "has ended",
    "X": "has ended",
}
# Files of the frames that every script has below its own.
_LAUNCHING = ("flatout/world/start.py", "<frozen runpy>")
_COLLECTIVES = "flatout/world/world.py"


@dataclass(frozen=True)
class Process:
    """A process, as others identify it.

    Attributes:
        pid: its process id.
        started: its start in the kernel's ticks, which differs for a later process with the same
            id.
        host: its host's name.
        machine: the same for processes that see each other's ids.
        thread: ident of its main thread.
        stacks: the file descriptor that its stacks are written to on a signal; -1 if it has none.
    """

    pid: int
    started: int
    host: str
    machine: str
    thread: int
    stacks: int

    @property
    def words(self) -> str:
        return f"process {self.pid} on host {self.host}"


def this_process() -> Process:
    """Return this process, which from now on writes its stacks when others on this machine ask."""
    pid = os.getpid()
    return Process(
        pid=pid,
        started=_seen(pid)[1],
        host=socket.gethostname(),
        machine=machine(),
        thread=threading.main_thread().ident or 0,
        stacks=_answer_signals(),
    )


def own_stack() -> list[str]:
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    frames = [] if frame is None else list(traceback.extract_stack(frame))
    while frames and frames[0].filename.endswith(_LAUNCHING):
        del frames[0]
    # Frames within a collective are left out; its caller is enough.
    inside = (n for n, item in enumerate(frames) if item.filename.endswith(_COLLECTIVES))
    del frames[next(inside, len(frames)) :]
    return "".join(traceback.format_list(frames)).splitlines()


def inspect_process(other: Process) -> tuple[str, list[str]]:
    state, started = _seen(other.pid)
    if started != other.started:
        return "has ended", []
    if state in "Tt":
        return process_state(other.pid), []
    if state in "ZX":
        return _STATES[state], []
    stack = _asked_by_signal(other)
    if state == "D" and not stack:
        return _STATES[state], []
    return "does not answer: some code holds its interpreter", stack


def process_state(pid: int) -> str:
    """Return a description of the state in which the kernel shows a process of this machine."""
    state, _ = _seen(pid)
    words = _STATES.get(state, "runs")
    return f"{words}; kill -CONT {pid} resumes the process" if state in "Tt" else words


def _answer_signals() -> int:
    if not hasattr(os, "memfd_create") or signal.getsignal(_SIGNAL) is not signal.SIG_DFL:
        return -1
    # A file in memory, which others read through /proc and which ends with the process.
    descriptor = os.memfd_create("flatout-stacks")
    faulthandler.register(_SIGNAL, file=descriptor, all_threads=True)
    return descriptor


def _asked_by_signal(other: Process) -> list[str]:
    if other.stacks < 0:
        return []
    path = Path(f"/proc/{other.pid}/fd/{other.stacks}")
    try:
        before = path.stat().st_size
        os.kill(other.pid, _SIGNAL)
        until = time.monotonic() + _WRITES_WITHIN_S
        size = before
        while time.monotonic() < until and (size == before or path.stat().st_size > size):
            size = path.stat().st_size
            time.sleep(0.05)
        written = path.read_bytes()[before:].decode(errors="replace")
    except OSError:
        return []
    return _main_thread(written, other.thread)


def _main_thread(written: str, thread: int) -> list[str]:
    for part in written.split("\n\n"):
        head, *lines = part.strip().splitlines() or [""]
        ident = re.match(r"(?:Current thread|Thread) 0x([0-9a-f]+)", head)
        if ident is not None and int(ident[1], 16) == thread:
            return _without_launching(lines[::-1])
    return []


def _without_launching(lines: Sequence[str]) -> list[str]:
    kept = list(lines)
    while kept and any(f'{name}"' in kept[0] for name in _LAUNCHING):
        del kept[0]
    return kept


def _seen(pid: int) -> tuple[str, int]:
    return state_and_start(pid) or ("X", 0)
