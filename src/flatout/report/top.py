"""Current activity of running jobs: the lanes of each rank, or the resources of any process.

Top().sample()                    all jobs that publish their lanes
Top(pid=4242).sample()            a process and all its children
watch(Top(), console)             again every second, until Ctrl-C
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.live import Live
from rich.table import Table
from rich.text import Text

from flatout.devices import GpuUse
from flatout.devices.gpu_use import gpu_use
from flatout.errors import FlatoutError
from flatout.measure import Processes, ProcessUse, Rank, Ranks
from flatout.words import clock, count_words, size_words

# Lanes in the table, by short name; all other lanes of a step are "other".
_LANES = {"input": "input", "forward": "fwd", "backward": "bwd", "sync": "sync", "optimizer": "opt"}
_MOST_PROCESSES = 20
# A rank counts as silent after the longer of _SILENT_S seconds and the time of _SILENT_STEPS steps.
_SILENT_S, _SILENT_STEPS = 5.0, 3
_EVERY_S, _FIRST_S = 1.0, 0.5


@dataclass(frozen=True)
class RankNow:
    """A rank, and the resources that its process uses together with its children.

    Attributes:
        rank: the state that the rank publishes.
        cpu_percent: CPU use in percent; 100 is one CPU.
        rss_bytes: bytes of resident memory; memory that several processes share counts in each
            process.
    """

    rank: Rank
    cpu_percent: float
    rss_bytes: int

    def as_dict(self) -> dict[str, Any]:
        own = asdict(self.rank) | {"is_starved": self.rank.is_starved}
        return own | {"cpu_percent": self.cpu_percent, "rss_bytes": self.rss_bytes}


@dataclass(frozen=True)
class RunningJob:
    ranks: Sequence[RankNow]

    @property
    def first(self) -> Rank:
        return self.ranks[0].rank

    @property
    def words(self) -> str:
        first = self.first
        here = f" ({len(self.ranks)} here)" if len(self.ranks) < first.world_size else ""
        ranks = [f"{first.world_size} ranks{here}"] if first.world_size > 1 else []
        speed = [] if first.throughput is None else [f"{count_words(first.throughput)} samples/s"]
        since = f"running {clock(time.time() - first.started)}"
        pid = f"pid {first.pid}"
        return " · ".join([_command(first), pid, *ranks, f"step {first.steps:,}", *speed, since])

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text(self.words, style="bold")
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
        for header in ("rank", *_LANES.values(), "other", "step ms", "CPU", "RSS"):
            table.add_column(header, justify="right", no_wrap=True)
        table.add_column("", no_wrap=True)
        for now in self.ranks:
            starved = now.rank.is_starved
            table.add_row(
                str(now.rank.rank),
                *_cells(now.rank),
                f"{now.cpu_percent:.0f}%",
                size_words(now.rss_bytes),
                "STARVED" if starved else "",
                style="bold yellow" if starved else None,
            )
        yield table
        for line in self.notes():
            yield Text(line)

    def notes(self) -> list[str]:
        lines = []
        for now in self.ranks:
            rank = now.rank
            name, others = f"rank {rank.rank}", "; the others wait for it in sync"
            if rank.world_size == 1:
                name, others = "it", ""
            if rank.is_starved:
                lines.append(
                    f"STARVED: {name} waited for input {rank.starved_s:.0f} of "
                    f"{rank.watched_s:.0f} s{others}"
                )
            silent = time.time() - rank.updated
            step_s = sum(ms or 0.0 for ms in rank.lanes_ms.values()) / 1e3
            if silent > max(_SILENT_S, _SILENT_STEPS * step_s):
                lines.append(f"{name} has ended no step for {clock(silent)}")
        return lines

    def as_dict(self) -> dict[str, Any]:
        first = self.first
        return {
            "job": first.job,
            "run": first.run,
            "command": first.command,
            "world_size": first.world_size,
            "ranks": [now.as_dict() for now in self.ranks],
        }


def together(snapshots: Sequence[Mapping[str, Any]]) -> Sample:
    """Merge samples of one job from its nodes, taken at one moment by `Sample.as_dict`.

    The nodes' clocks may differ: times are shifted by the difference of each node's current time.
    """
    ranks: dict[int, RankNow] = {}
    gpus = []
    now = time.time()
    for node in snapshots:
        shift = now - node["time"]
        for job in node["jobs"]:
            # By rank, since two nodes on one machine list each other's ranks.
            ranks |= {item["rank"]: _rank_now(item, shift) for item in job["ranks"]}
        for gpu in node["gpus"]:
            gpus.append(GpuUse(**{**gpu, "name": f"{gpu['name']} of {node['host']}"}))
    return Sample([RunningJob([ranks[n] for n in sorted(ranks)])] if ranks else [], None, gpus)


def _rank_now(value: Mapping[str, Any], shift_s: float) -> RankNow:
    own = {name: value[name] for name in Rank.__dataclass_fields__}
    rank = Rank(**own)
    rank.started += shift_s
    rank.updated += shift_s
    return RankNow(rank, value["cpu_percent"], value["rss_bytes"])


@dataclass(frozen=True)
class Sample:
    """The state of running jobs at one moment.

    Attributes:
        processes: processes below the requested one; None if none was requested.
    """

    jobs: Sequence[RunningJob]
    processes: Sequence[ProcessUse] | None
    gpus: Sequence[GpuUse]

    def as_dict(self) -> dict[str, Any]:
        processes = self.processes
        return {
            "host": socket.gethostname(),
            "time": time.time(),
            "jobs": [job.as_dict() for job in self.jobs],
            "processes": None if processes is None else [asdict(process) for process in processes],
            "gpus": [asdict(gpu) for gpu in self.gpus],
        }

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if len(self.jobs) == 1:
            yield self.jobs[0]
        for job in self.jobs if len(self.jobs) > 1 else ():
            yield Text(job.words, style="bold")
            for line in job.notes():
                yield Text(f"  {line}")
        if len(self.jobs) > 1:
            yield Text("flatout top PID shows one of them")
        if self.processes is not None:
            yield from self._processes(self.processes)
        for gpu in self.gpus:
            yield Text(_gpu(gpu))

    def _processes(self, processes: Sequence[ProcessUse]) -> Iterator[RenderableType]:
        table = Table(
            box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim", expand=True
        )
        for header in ("pid", "CPU", "RSS", "threads", "state", "read/s"):
            table.add_column(header, justify="right", no_wrap=True)
        table.add_column("command", no_wrap=True, overflow="ellipsis", ratio=1)
        root, *others = processes
        others.sort(key=lambda process: -process.cpu_percent)
        shown = [root, *others[: _MOST_PROCESSES - 1]]
        for process in shown:
            read = process.read_bytes_per_s
            table.add_row(
                str(process.pid),
                f"{process.cpu_percent:.0f}%",
                size_words(process.rss_bytes),
                str(process.threads),
                process.state,
                "-" if read is None else size_words(read),
                Text(" ".join(process.command.split())),
            )
        yield table
        if len(processes) > len(shown):
            yield Text(f"and {len(processes) - len(shown)} more that use less")
        if not self.jobs:
            yield Text(
                "from outside only CPU, memory, threads and what is read can be seen; a step's "
                "lanes (input, forward, backward, sync, optimizer) show themselves from within: "
                "flatout.Trainer, flatout.integrations, flatout doctor script.py",
                style="dim",
            )


class Top:
    """Samples running jobs repeatedly.

    Args:
        which: run folder, script name or process ID of a rank of a job; None for all jobs.
        pid: process to inspect from outside, with all its children.
    """

    def __init__(self, which: str | None = None, pid: int | None = None) -> None:
        self._which = which
        self._pid = pid
        self._ranks = Ranks()
        # Separate objects, since the CPU use of a process counts from the last read by the object.
        self._tree, self._inside_ranks = Processes(), Processes()
        self._has_sampled = False

    def sample(self) -> Sample:
        """Take a sample. The first one takes half a second, since CPU use needs an interval.

        Raises:
            FlatoutError: the process does not exist.
        """
        if not self._has_sampled:
            self._sample()
            self._has_sampled = True
            self.wait(_FIRST_S)
        return self._sample()

    def wait(self, seconds: float) -> None:
        time.sleep(seconds)

    def _sample(self) -> Sample:
        processes = None if self._pid is None else self._tree.read(self._pid)
        result = sorted(self._ranks.read(), key=lambda rank: (rank.job, rank.rank))
        jobs = [list(ranks) for _, ranks in groupby(result, key=lambda rank: rank.job)]
        if processes is not None:
            inside = {process.pid for process in processes}
            jobs = [ranks for ranks in jobs if any(rank.pid in inside for rank in ranks)]
        if self._which is not None:
            jobs = [ranks for ranks in jobs if any(_is_asked_for(r, self._which) for r in ranks)]
        running = [RunningJob(list(self._now(ranks))) for ranks in jobs]
        return Sample([job for job in running if job.ranks], processes, gpu_use())

    def _now(self, ranks: Sequence[Rank]) -> Iterator[RankNow]:
        for rank in ranks:
            with suppress(FlatoutError):  # the rank has ended meanwhile
                own = self._inside_ranks.read(rank.pid)
                cpu = sum(process.cpu_percent for process in own)
                yield RankNow(rank, cpu, sum(process.rss_bytes for process in own))

    def check(self, sample: Sample) -> None:
        """Check that there is a job to show.

        Raises:
            FlatoutError: no such job runs.
        """
        if sample.jobs or sample.processes is not None:
            return
        what = "no job" if self._which is None else f"no job {self._which}"
        raise FlatoutError(
            f"{what} that shows its lanes is running here",
            do="start it with flatout.Trainer, flatout.Loop or one of flatout.integrations; "
            "flatout top --pid N shows any process from outside",
        )


def watch(top: Top, console: Console) -> None:
    """Show the job until it ends or Ctrl-C.

    Raises:
        FlatoutError: there is nothing to show at the start.
    """
    sample = top.sample()
    top.check(sample)
    with suppress(KeyboardInterrupt), Live(console=console, auto_refresh=False) as live:
        while True:
            live.update(sample, refresh=True)
            top.wait(_EVERY_S)
            try:
                sample = top.sample()
                top.check(sample)
            except FlatoutError:
                console.print("it has ended")
                return


def _is_asked_for(rank: Rank, which: str) -> bool:
    names = {str(rank.pid), os.path.basename(rank.command[0]) if rank.command else ""}
    return which in {*names, rank.submitted} or rank.run in (which, os.path.abspath(which))


def _cells(rank: Rank) -> list[str]:
    lanes = rank.lanes_ms
    if not lanes:
        return ["-"] * (len(_LANES) + 2)
    whole = sum(ms or 0.0 for ms in lanes.values())
    other = whole - sum(lanes.get(lane) or 0.0 for lane in _LANES)
    return [_ms(lanes.get(lane)) for lane in _LANES] + [_ms(max(other, 0.0)), _ms(whole)]


def _ms(ms: float | None) -> str:
    if ms is None:
        return "-"
    return f"{ms:,.0f}" if ms >= 100 else f"{ms:.1f}" if ms >= 10 else f"{ms:.2f}"


def _command(rank: Rank) -> str:
    words = [Path(rank.command[0]).name, *rank.command[1:]] if rank.command else ["?"]
    line = " ".join(words)
    return line if len(line) <= 40 else f"{line[:39]}…"


def _gpu(gpu: GpuUse) -> str:
    busy = "" if gpu.busy_percent is None else f" · {gpu.busy_percent}% busy"
    memory = ""
    if gpu.memory_used is not None and gpu.memory_total is not None:
        memory = f" · {size_words(gpu.memory_used)} of {size_words(gpu.memory_total)} used"
    return f"GPU {gpu.index} {gpu.name}{busy}{memory}"
