"""Whether a process works in bursts and stands still between them, seen from outside.

Every 50 ms the CPU time of all its threads is looked at: of a sample, at least the part that this
leaves over was idle. Several threads can hide idleness from that, and never feign it. What it has
started is looked at about once a second.

Standing still is called starvation where a loader's workers computed meanwhile, or where it waited
for a disk. Of a process that computes on a GPU it is the GPU that stands still, while the process
or its workers compute. What else stands still waits for something that no one sees from here.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import psutil

from flatout.measure.processes import ProcessUse

_EVERY_S = 0.05
_WATCHED_S, _FEWEST_S = 60.0, 5.0
# As of a job that shows its lanes: a stretch with so much of it is counted.
_STARVED = 0.25
# The one who stands still must have had so much of that time filled by those it waits for,
_EXPLAINED = 0.5
# and work in so much of the whole: what only waits for others, such as a launcher, is not starved.
_WORKS = 0.02


@dataclass(frozen=True)
class Stretch:
    """About a second of it.

    Attributes:
        seconds: how long.
        cpu_s: CPU time of the process itself, all threads.
        idle_s: in which none of its threads ran, at least.
        disk_s: of these, in which it waited for a disk.
        workers_cpu_s: CPU time of the processes that load for it.
        gpu_idle_s: in which its GPU ran no kernel; None where that is not known.
    """

    seconds: float
    cpu_s: float
    idle_s: float
    disk_s: float
    workers_cpu_s: float
    gpu_idle_s: float | None = None

    @property
    def stands_still_s(self) -> float:
        """The GPU, or without one the process."""
        return self.idle_s if self.gpu_idle_s is None else self.gpu_idle_s

    @property
    def is_starved(self) -> bool:
        """Whether it stands still in much of it, while its input is made."""
        still = self.stands_still_s
        input_s = self.workers_cpu_s + self.disk_s
        if self.gpu_idle_s is not None:
            input_s += self.cpu_s
        return still >= _STARVED * self.seconds and input_s >= _EXPLAINED * still


@dataclass(frozen=True)
class Pulse:
    """What was seen of the last minute.

    Attributes:
        watched_s: how long it was watched, a minute at most.
        still_s: in which it stood still.
        starved_s: stretches in which it did so for a quarter or more, while its input was made.
        workers: processes that load for it, as far as can be told.
        on_gpu: whether it is the GPU that stood still.
        works: whether it computes at all.
    """

    watched_s: float
    still_s: float
    starved_s: float
    workers: int
    on_gpu: bool
    works: bool

    @property
    def is_starved(self) -> bool:
        """Whether it is in most of the time, and was watched long enough to tell."""
        return self._is_known and self.starved_s >= self.watched_s / 2

    @property
    def is_still(self) -> bool:
        """Whether it works, but stands still in most of the time."""
        return self._is_known and self.still_s >= self.watched_s / 2

    @property
    def _is_known(self) -> bool:
        return self.works and self.watched_s >= _FEWEST_S

    def as_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self) | {"is_starved": self.is_starved, "is_still": self.is_still}


class Watched:
    """A process, watched whenever there is time to.

    Args:
        pid: of a process that runs.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._stretches: deque[Stretch] = deque()
        self._workers = 0
        try:
            self._process: Any = psutil.Process(pid)
        except psutil.Error:  # the one who asks for it is told elsewhere
            self._process = None
        self._begin()

    def _begin(self) -> None:
        self._began = self._at = time.monotonic()
        self._cpu_s = self._cpu_then = self._look()[0]
        self._idle_s = self._disk_s = 0.0

    def _look(self) -> tuple[float, str]:
        if self._process is None:
            return 0.0, psutil.STATUS_DEAD
        try:
            with self._process.oneshot():
                times = self._process.cpu_times()
                return times.user + times.system, str(self._process.status())
        except psutil.Error:
            self._process = None
            return self._look()

    def wait(self, seconds: float) -> None:
        """Watch it for so long."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            time.sleep(min(_EVERY_S, left))
            self._sample()

    def _sample(self) -> None:
        now = time.monotonic()
        cpu_s, state = self._look()
        idle = max(0.0, now - self._at - (cpu_s - self._cpu_s))
        self._at, self._cpu_s = now, cpu_s
        if state == psutil.STATUS_RUNNING:  # it would run if others let it
            return
        self._idle_s += idle
        if state == psutil.STATUS_DISK_SLEEP:
            self._disk_s += idle

    def pulse(self, processes: Sequence[ProcessUse], gpu_busy: float | None) -> Pulse:
        """Ends a stretch, and reports the last minute.

        Args:
            processes: the process and all that it has started, in this stretch.
            gpu_busy: share of this stretch in which the GPU ran that it computes on; None without.
        """
        seconds = self._at - self._began
        workers = _workers(processes)
        self._workers = len(workers)
        if seconds > 0:
            stretch = Stretch(
                seconds,
                self._cpu_s - self._cpu_then,
                self._idle_s,
                self._disk_s,
                seconds * sum(worker.cpu_percent for worker in workers) / 100,
                None if gpu_busy is None else seconds * (1 - gpu_busy),
            )
            self._stretches.append(stretch)
        while sum(stretch.seconds for stretch in self._stretches) > _WATCHED_S:
            self._stretches.popleft()
        self._begin()
        return pulse_of(self._stretches, self._workers)


def pulse_of(stretches: Sequence[Stretch], workers: int) -> Pulse:
    """What these stretches come to."""
    watched = sum(stretch.seconds for stretch in stretches)
    on_gpu = bool(stretches) and stretches[-1].gpu_idle_s is not None
    still = sum(stretch.stands_still_s for stretch in stretches)
    cpu = sum(stretch.cpu_s for stretch in stretches)
    busy = watched - still if on_gpu else cpu
    return Pulse(
        watched_s=watched,
        still_s=still,
        starved_s=sum(stretch.seconds for stretch in stretches if stretch.is_starved),
        workers=workers,
        on_gpu=on_gpu,
        works=busy >= _WORKS * watched,
    )


def _workers(processes: Sequence[ProcessUse]) -> list[ProcessUse]:
    if not processes:
        return []
    root, *others = processes
    return [
        other
        for other in others
        if other.command == root.command or "from multiprocessing" in other.command
    ]
