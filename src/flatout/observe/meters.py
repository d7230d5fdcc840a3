"""Resources of the process while it steps: memory, page faults, runnable threads."""

from __future__ import annotations

import os
import resource
from math import ceil
from pathlib import Path
from statistics import median
from time import perf_counter_ns

from flatout.measure import usable_cpus
from flatout.observe.observation import Observation
from flatout.observe.watch import Watch
from flatout.processes import descendants

_PAGE = os.sysconf("SC_PAGE_SIZE")
# Half of the maximum number of memory samples, which are distributed evenly over all steps.
_LOOKS = 64
# _FIRST_LOOKS: number of first memory samples without a minimum distance in time; _APART_S: minimum
# seconds between later samples, so that short steps are not slowed down.
_FIRST_LOOKS, _APART_S = 8, 0.2
# Maximum number of samples of the whole job.
_JOB_LOOKS = 30


class Meters:
    """Meters of the process, read in some steps, and of the whole job, read once a second."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._begin()
        self._statm = _statm()
        self.usable_cpus = usable_cpus()
        watch.at(1, self._look)
        watch.on_renewal.append(self._begin)

    def _begin(self) -> None:
        self._stride = 1
        self._looked_at = 0
        self._memory: list[tuple[int, float, float]] = []
        self._faults: list[tuple[int, int, int]] = []
        self._runnable: list[float] = []
        self._job: list[tuple[int, float]] = []
        self._swapped: list[float] = []

    def _look(self) -> None:
        lanes = self._watch.lanes
        step, now = lanes.steps, perf_counter_ns()
        if len(self._memory) > _FIRST_LOOKS:
            took_s = (now - self._looked_at) / 1e9 / max(1, step - self._memory[-1][0])
            self._stride = max(self._stride, ceil(_APART_S / took_s))
        self._looked_at = now
        resident, of_files = self._pages()
        own = resident - of_files
        self._memory.append((step, resident * _PAGE / 2**20, own * _PAGE / 2**20))
        usage = resource.getrusage(resource.RUSAGE_SELF)
        self._faults.append((step, usage.ru_minflt, usage.ru_majflt))
        if len(self._memory) >= 2 * _LOOKS:
            self._stride *= 2
            self._memory = self._memory[::2]
            self._faults = self._faults[::2]
        self._watch.at(step + self._stride, self._look)

    def _pages(self) -> tuple[int, int]:
        try:
            fields = os.pread(self._statm, 100, 0).split()
            return int(fields[1]), int(fields[2])
        except (OSError, ValueError, IndexError):
            # The script has closed all unknown file descriptors, as daemons do.
            self._statm = _statm()
            fields = os.pread(self._statm, 100, 0).split()
            return int(fields[1]), int(fields[2])

    def grown_mb(self) -> float:
        """Return the MB of steady memory growth, without the growth in the first steps."""
        memory = [mb for _, mb, _ in self._memory[len(self._memory) // 4 :]]
        if not memory:
            return 0.0
        middle = memory[len(memory) // 2]
        return 2 * min(middle - memory[0], memory[-1] - middle)

    def look_at_job(self) -> None:
        """Sample threads and memory of this process and its children; not within a step."""
        if len(self._runnable) < _JOB_LOOKS and self._watch.lanes.steps:
            job = _job()
            # Without the thread that takes this sample.
            self._runnable.append(max(0, _runnable_threads(job) - 1) / self.usable_cpus)
            step, megabytes = self._watch.lanes.steps, held_mb(job)
            if megabytes is not None:
                self._job.append((step, megabytes[0]))
                self._swapped.append(megabytes[1])

    def fill(self, observation: Observation) -> None:
        """Add the samples to an Observation."""
        memory, faults = list(self._memory), list(self._faults)
        observation.memory_at = [step for step, _, _ in memory]
        observation.memory_mb = [round(mb, 2) for _, mb, _ in memory]
        observation.own_mb = [round(mb, 2) for _, _, mb in memory]
        observation.runnable = median(self._runnable) if self._runnable else None
        job = list(self._job)
        observation.job_at = [step for step, _ in job]
        observation.job_mb = [round(mb, 2) for _, mb in job]
        observation.swapped_mb = max(self._swapped, default=None)
        # Without the first steps, which map memory that later steps reuse.
        settled = [row for row in faults if row[0] > 2] or faults
        if len(settled) > 1:
            (first, minor, major), (last, minor_then, major_then) = settled[0], settled[-1]
            observation.page_faults = (minor_then - minor) / (last - first)
            observation.major_faults = (major_then - major) / (last - first)


def _statm() -> int:
    return os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)


def _job() -> list[int]:
    if not os.path.exists("/proc/thread-self/children"):  # a kernel without that file
        import psutil

        me = psutil.Process()
        return [me.pid, *(child.pid for child in me.children(recursive=True))]
    return [os.getpid(), *descendants(os.getpid())]


def held_mb(job: list[int]) -> tuple[float, float] | None:
    """Return MB that belong to no file, and those in swap; None where the kernel does not say."""
    sizes = {"RssAnon": 0, "VmSwap": 0}
    for pid in job:
        try:
            status = Path(f"/proc/{pid}/status").read_text()
        except OSError:
            continue  # the process has ended
        lines = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
        if not sizes.keys() <= lines.keys():
            if "VmRSS" in lines:
                return None
            continue  # a zombie process
        for name in sizes:
            sizes[name] += int(lines[name].split()[0])
    swapped = sizes["VmSwap"] / 2**10
    return sizes["RssAnon"] / 2**10 + swapped, swapped


def _runnable_threads(job: list[int]) -> int:
    running = 0
    for pid in job:
        for task in Path(f"/proc/{pid}/task").glob("*/stat"):
            try:
                state = task.read_text().rpartition(")")[2].split()[0]
            except (OSError, IndexError):
                continue
            running += state == "R"
    return running
