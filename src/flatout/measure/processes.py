"""The CPU, memory, threads and read bytes of any process, read from outside."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import psutil

from flatout.errors import FlatoutError


@dataclass(frozen=True)
class ProcessUse:
    """One process since the last read.

    Attributes:
        pid, parent: ids of the process, and of the process that started it.
        command: with arguments; the name if these may not be read.
        cpu_percent: 100 is one CPU.
        rss_bytes: resident memory, including shared memory.
        threads: number of threads.
        state: in the system's words: "running", "sleeping", "disk-sleep", ...
        read_bytes_per_s: from disks and pipes; None if the system does not report it.
    """

    pid: int
    parent: int
    command: str
    cpu_percent: float
    rss_bytes: int
    threads: int
    state: str
    read_bytes_per_s: float | None


class Processes:
    """Reads processes and all that they have started, repeatedly.

    CPU and bytes are those since the last read, so the first read has none.
    """

    def __init__(self) -> None:
        self._known: dict[int, _Known] = {}

    def read(self, pid: int) -> list[ProcessUse]:
        """Return the process itself, then its children and theirs.

        Raises:
            FlatoutError: there is no such process.
        """
        try:
            root = psutil.Process(pid)
            tree = [root, *root.children(recursive=True)]
        except psutil.Error:
            raise FlatoutError(f"no process {pid} is running here") from None
        result = [self._read_one(process) for process in tree]
        return [item for item in result if item is not None]

    def _read_one(self, process: Any) -> ProcessUse | None:
        # The object of the last read knows the CPU time at that time.
        known = self._known.get(process.pid)
        if known is None or known.process != process:
            known = self._known[process.pid] = _Known(process)
        try:
            with known.process.oneshot():
                return known.use()
        except psutil.Error:  # the process has ended
            self._known.pop(process.pid, None)
            return None


class _Known:
    def __init__(self, process: Any) -> None:
        self.process = process
        self._read: int | None = None
        self._at = 0.0

    def use(self) -> ProcessUse:
        process = self.process
        return ProcessUse(
            pid=process.pid,
            parent=process.ppid(),
            command=_command(process),
            cpu_percent=process.cpu_percent(None),
            rss_bytes=process.memory_info().rss,
            threads=process.num_threads(),
            state=process.status(),
            read_bytes_per_s=self._read_per_s(),
        )

    def _read_per_s(self) -> float | None:
        try:
            counters = self.process.io_counters()
        except (psutil.AccessDenied, AttributeError):
            return None
        # On Linux the bytes of read(2), including those from the page cache; elsewhere those of the
        # disk.
        total = getattr(counters, "read_chars", counters.read_bytes)
        now = time.monotonic()
        before, at, self._read, self._at = self._read, self._at, total, now
        return None if before is None else (total - before) / max(now - at, 1e-9)


def _command(process: Any) -> str:
    try:
        words: Sequence[str] = process.cmdline()
    except psutil.AccessDenied:
        words = []
    return " ".join(words) or str(process.name())
