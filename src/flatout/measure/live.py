"""The state of a running job for `flatout top`: one small file for each rank.

    cache_folder()/live/<pid>.json

The file is written at the end of a step, about once a second, and removed at the end. There is no
thread, and no failure here can fail the job: a write that fails is left out. FLATOUT_LIVE=0 turns
it off.
"""

from __future__ import annotations

import json
import os
import socket
import stat
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from time import perf_counter_ns as clock
from typing import TYPE_CHECKING, Any

from flatout.atomic_file import atomic_write
from flatout.cache_folder import cache_folder, is_made, kind_folder, private, remove
from flatout.masked import masked

if TYPE_CHECKING:
    from flatout.measure.timeline import Timeline

SUBMITTED = "FLATOUT_SUBMITTED"
"""Set by the scripts of `flatout submit`: identifies the job on its nodes."""

_EVERY_NS = 1_000_000_000
_NEVER = 2**63
# _RECENT_S: last seconds whose lanes are reported. _WATCHED_S: last seconds that are checked for
# starvation.
_RECENT_S, _WATCHED_S = 5.0, 60.0
# Smallest fraction of a period spent waiting for input that counts as starved.
_STARVED = 0.25
# Largest size of a file that is read. Live files take a few hundred bytes, observations some more.
_MOST_BYTES = 16 << 20
_MOST_RANKS = 1_000_000
# Largest difference in seconds between two readings of the same process' start.
_SAME_START_S = 2.0


class Live:
    """Writes this rank's file.

    Attributes:
        due: time on `perf_counter_ns`' clock; call `write` at the end of the first step after it.

    Args:
        rank: number of this process.
        world_size: number of ranks that train together.
        job: the same text in all ranks of a job, and in no other job of this machine. None derives
            it from rank 0's address, or from the process that started the ranks.
        run: the folder of the run, or None.
    """

    def __init__(
        self,
        timeline: Timeline,
        *,
        rank: int = 0,
        world_size: int = 1,
        job: str | None = None,
        run: str | None = None,
    ) -> None:
        self._timeline = timeline
        self._who = _who(rank, world_size, job, run)
        self._looks = deque([self._look_at(clock() / 1e9)])
        self._finalize: Callable[[], object] | None = None
        self.due = _NEVER if _is_off() else clock() + _EVERY_NS

    def write(self) -> None:
        """Write the times of the steps of the last seconds."""
        now = clock()
        self.due = now + _EVERY_NS
        with suppress(Exception):  # no error here is worth the job
            self._write(now)

    def close(self) -> None:
        """Remove the file, and those of killed processes. A second call changes nothing."""
        if self._finalize is not None:
            self._finalize()
        if self.due != _NEVER:
            _sweep(cache_folder() / "live")
        self.due = _NEVER

    def _write(self, now: int) -> None:
        if self._finalize is None:
            self._finalize = weakref.finalize(self, _remove, _own_file(), os.getpid())
        figures = _recent(self._look(now / 1e9))
        _write({**_process(), **self._who, "steps": self._timeline.steps, **figures})

    def _look(self, now: float) -> deque[_Look]:
        steps = self._timeline.steps
        if steps < self._looks[-1].steps:  # the Timeline was reset
            self._looks = deque([_Look(now - _EVERY_NS / 1e9, 0, {})])
        _note(self._looks, self._look_at(now))
        return self._looks

    def _look_at(self, now: float) -> _Look:
        timeline = self._timeline
        steps = timeline.steps
        totals = {lane: ms * steps for lane, ms in timeline.lanes().items()}
        return _Look(now, steps, totals, timeline.samples)


def point_to(
    file: str | os.PathLike[str],
    *,
    rank: int = 0,
    world_size: int = 1,
    job: str | None = None,
    run: str | None = None,
) -> None:
    if not _is_off():
        with suppress(Exception):
            who = _who(rank, world_size, job, run)
            _write({**_process(), **who, "file": os.path.abspath(file)})


def remove_own_file() -> None:
    with suppress(Exception):
        _remove(_own_file(), os.getpid())


@dataclass
class Rank:
    """A rank of a running job, as its file describes it.

    Attributes:
        rank, world_size: number of the rank and count of ranks in its job.
        job: the same for all ranks of one job.
        submitted: the name from `flatout submit`, or None for a job that was started by hand.
        started: start of its process, in seconds since 1970.
        updated: time of writing the file, in seconds since 1970.
        steps: optimizer steps so far.
        lanes_ms: per step of the last seconds, by the names of measure.LANES; None for a lane that
            cannot be measured. Empty before the first step.
        throughput: samples per second of all ranks, or None if unknown.
        watched_s: seconds checked for starvation, at most 60.
        starved_s: seconds of these in periods with at least a quarter spent waiting for input.
    """

    pid: int
    rank: int
    world_size: int
    job: str
    run: str | None
    command: list[str]
    started: float
    updated: float
    steps: int = 0
    lanes_ms: dict[str, float | None] = field(default_factory=dict)
    throughput: float | None = None
    watched_s: float = 0.0
    starved_s: float = 0.0
    submitted: str | None = None

    @property
    def is_starved(self) -> bool:
        """True if the rank was starved for at least half of the checked time."""
        return self.watched_s > 0 and self.starved_s >= self.watched_s / 2


class Ranks:
    """Reads the files of all running jobs of this machine, repeatedly.

    An observation reports the lanes since its start. The lanes of the last seconds are the
    difference to the previous read.
    """

    def __init__(self) -> None:
        self._looks: dict[int, deque[_Look]] = {}

    def read(self) -> list[Rank]:
        """Return the ranks whose process still runs, by job and rank."""
        result = []
        folder = cache_folder() / "live"
        for file in sorted(folder.glob("*.json")) if is_made(folder) else ():
            # The file may come from another version of Flatout, a full disk, or any other program.
            with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
                data, _ = _read(file)
                if data["host"] == socket.gethostname() and file.stem == str(data["pid"]):
                    rank = self._rank(data)
                    if _runs(rank.pid, rank.started):
                        result.append(rank)
        return sorted(result, key=lambda rank: (rank.started, rank.job, rank.rank))

    def _rank(self, data: dict[str, Any]) -> Rank:
        file = data.pop("file", None)
        if file is not None:
            data |= self._observed(data["pid"], Path(file))
        names = Rank.__dataclass_fields__
        rank = Rank(**{name: value for name, value in data.items() if name in names})
        _check(rank)
        return rank

    def _observed(self, pid: int, file: Path) -> dict[str, Any]:
        try:
            status, written = _read(file)
        except (OSError, ValueError):
            return {}
        steps, lanes = _count(status["steps"]), _lanes(status["lanes_ms"])
        looks = self._looks.setdefault(pid, deque())
        if not looks:
            looks.append(_Look(0.0, 0, {}))
        totals = {lane: ms * steps for lane, ms in lanes.items() if ms is not None}
        if steps > looks[-1].steps:
            _note(looks, _Look(time.monotonic(), steps, totals))
        recent = _recent(looks)
        recent["lanes_ms"] = {lane: recent["lanes_ms"].get(lane) for lane in lanes}
        return {"steps": steps, "command": status["command"], "updated": written, **recent}


def _read(file: Path) -> tuple[dict[str, Any], float]:
    # A file that is no regular file must not block, and a link may lead anywhere.
    handle = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    with open(handle, "rb") as opened:
        status = os.fstat(opened.fileno())
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
            raise ValueError("not a file of this user's")
        content = opened.read(_MOST_BYTES + 1)
    if len(content) > _MOST_BYTES:
        raise ValueError("too large")
    try:
        data = json.loads(content)
    except RecursionError:
        raise ValueError("too deep") from None
    if not isinstance(data, dict):
        raise ValueError("not an object")
    return data, status.st_mtime


def _check(rank: Rank) -> None:
    numbers = [rank.started, rank.updated, rank.watched_s, rank.starved_s]
    for number in [*numbers, *([] if rank.throughput is None else [rank.throughput])]:
        _finite(number)
    if not _count(rank.rank) < _count(rank.world_size) <= _MOST_RANKS or not _count(rank.pid):
        raise ValueError("no rank of a job")
    _count(rank.steps)
    _lanes(rank.lanes_ms)
    words = [rank.job, rank.run or "", rank.submitted or "", *rank.command]
    if not isinstance(rank.command, list) or not all(isinstance(word, str) for word in words):
        raise ValueError("no words")


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**63:
        raise ValueError(f"{value!r} is no count")
    return value


def _finite(value: Any) -> float:
    if type(value) not in (int, float) or not 0 <= value < 1e18:
        raise ValueError(f"{value!r} is no number from 0")
    return float(value)


def _lanes(value: Any) -> dict[str, float | None]:
    if not isinstance(value, dict):
        raise ValueError("no lanes")
    return {str(lane): None if ms is None else _finite(ms) for lane, ms in value.items()}


@dataclass(frozen=True)
class _Look:
    """The progress at a time, in seconds: steps, ms in each lane, and samples."""

    at: float
    steps: int
    totals: Mapping[str, float]
    samples: int = 0


def _note(looks: deque[_Look], look: _Look) -> None:
    looks.append(look)
    while len(looks) > 2 and look.at - looks[1].at >= _WATCHED_S:
        looks.popleft()


def _recent(looks: Sequence[_Look]) -> dict[str, Any]:
    last = looks[-1]
    before = next((look for look in looks if last.at - look.at <= _RECENT_S), last)
    if last.steps == before.steps:  # a step takes longer than that interval
        before = max(
            (look for look in looks if look.steps < last.steps),
            key=lambda look: look.at,
            default=last,
        )
    steps = last.steps - before.steps
    lanes = {}
    if steps:
        for lane, ms in last.totals.items():
            lanes[lane] = max(0.0, ms - before.totals.get(lane, 0.0)) / steps
    watched = starved = 0.0
    for item, other in zip(list(looks)[:-1], list(looks)[1:], strict=True):
        took = sum(other.totals.values()) - sum(item.totals.values())
        watched += took / 1e3
        waited = other.totals.get("input", 0.0) - item.totals.get("input", 0.0)
        starved += took / 1e3 if took > 0 and waited >= _STARVED * took else 0.0
    rate = 1e3 / sum(lanes.values()) if sum(lanes.values()) > 0 else 0.0
    samples = (last.samples - before.samples) / steps if steps else 0.0
    return {
        "lanes_ms": lanes,
        "steps_per_s": rate,
        "throughput": rate * samples if samples else None,
        "watched_s": min(watched, _WATCHED_S),
        "starved_s": min(starved, watched, _WATCHED_S),
    }


def _is_off() -> bool:
    return os.environ.get("FLATOUT_LIVE") == "0"


def _who(rank: int, world_size: int, job: str | None, run: str | None) -> dict[str, Any]:
    if job is None:
        job = str(os.getpid())
        if world_size > 1:
            address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
            job = f"{address}:{port}" if port else f"ranks of {os.getppid()}"
    run = None if run is None else run if "://" in run else os.path.abspath(run)
    submitted = os.environ.get(SUBMITTED)
    return {
        "rank": rank,
        "world_size": world_size,
        "job": job,
        "run": run,
        "submitted": submitted,
    }


def _process() -> dict[str, Any]:
    return {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "command": masked(sys.argv),
        "started": _started(os.getpid()),
        "updated": time.time(),
    }


@cache
def _started(pid: int) -> float:
    import psutil

    return float(psutil.Process(pid).create_time())


def _runs(pid: int, started: float) -> bool:
    import psutil

    try:
        process = psutil.Process(pid)
        same = bool(abs(process.create_time() - started) < _SAME_START_S)
        own = bool(process.uids().effective == os.geteuid())
        lives = bool(process.status() != psutil.STATUS_ZOMBIE)
        return same and own and lives and _runs_python(process)
    except (psutil.Error, OverflowError, TypeError, ValueError):
        return False


def _runs_python(process: Any) -> bool:
    if "python" in os.path.basename(process.exe()):
        return True
    try:
        return "python" in Path(f"/proc/{process.pid}/maps").read_text(errors="replace")
    except OSError:
        return False


def _own_file() -> Path:
    return cache_folder() / "live" / f"{os.getpid()}.json"


def _write(data: dict[str, Any]) -> None:
    file = _own_file()
    if not file.exists():
        _sweep(kind_folder("live"))
    with suppress(OSError), atomic_write(file, opener=private) as out:
        out.write(json.dumps(data))


def _sweep(folder: Path) -> None:
    for file in folder.glob("*.json"):
        with suppress(OSError, ValueError, KeyError, TypeError):
            data, _ = _read(file)
            gone = not _runs(data["pid"], data["started"])
            if data["host"] == socket.gethostname() and gone:
                remove(file)


def _remove(file: Path, pid: int) -> None:
    # A process that was forked since then must not remove it.
    if os.getpid() == pid:
        with suppress(OSError):
            file.unlink(missing_ok=True)
