"""A job's use of its machine over time, in a few hundred points for any duration.

    use = Use()
    at the end of a step:  if clock() >= use.due: use.look()

The kernel counts CPU seconds, so the use between two reads is known however far apart they are.
There is no thread. At 256 points, each two become one, and the interval doubles.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Mapping, Sequence
from time import perf_counter_ns as clock

import psutil

from flatout.processes import children, cpu_times_ns

_EVERY_NS = 2_000_000_000
_MOST_POINTS = 256
# Divisor of the usual interval: a point that is ended early takes at least this part of it.
_LEAST = 4

COLUMNS = ("seconds", "cpus", "machine", "memory_bytes", "gpu", "gpu_memory_bytes")
"""The columns of a point, in which None is unknown. seconds: its end, since the first read. cpus:
number of CPUs that the process and its children kept busy. machine: busy share of all CPUs of the
machine, by any process. memory_bytes: resident memory of the process. The last two: the share of
time in which its GPU ran a kernel, and the GPU's used memory.
"""

Point = tuple[float | None, ...]


class Use:
    """Measures the use of this process from time to time.

    Args:
        gpu: returns the share of time in which the GPU ran, from 0 to 1, and its used bytes; None
            without a GPU.

    Attributes:
        due: time on `perf_counter_ns`' clock after which `look` must be called.
    """

    def __init__(self, gpu: Callable[[], tuple[float | None, int | None]] | None = None) -> None:
        self._gpu = gpu
        self._process = psutil.Process()
        self._every_ns = _EVERY_NS
        self._points: list[Point] = []
        self._began = self._at = clock()
        self._used_s, self._machine = _used_s(), _machine_s()
        self.due = self._at + self._every_ns

    def look(self) -> None:
        """End a point, unless the one before has just ended."""
        now = clock()
        least = self._every_ns / _LEAST if self._points else 1
        if now - self._at < least:
            return
        passed = (now - self._at) / 1e9
        self.due = now + self._every_ns
        used_s, machine = _used_s(), _machine_s()
        busy, whole = (after - before for after, before in zip(machine, self._machine, strict=True))
        gpu, gpu_memory = (None, None) if self._gpu is None else self._gpu()
        self._points.append(
            (
                (now - self._began) / 1e9,
                max(0.0, used_s - self._used_s) / passed,
                min(1.0, max(0.0, busy / whole)) if whole > 0 else None,
                self._process.memory_info().rss,
                gpu,
                gpu_memory,
            )
        )
        self._at, self._used_s, self._machine = now, used_s, machine
        if len(self._points) >= _MOST_POINTS:
            self._points = thinned(self._points)
            self._every_ns *= 2

    def as_dict(self) -> dict[str, list[float | None]]:
        """Return the points by column, see `COLUMNS`; a column without any figure is left out."""
        columns = zip(*self._points, strict=True) if self._points else ()
        result = dict(zip(COLUMNS, map(list, columns), strict=False))
        return {
            name: [None if value is None else float(f"{value:.4g}") for value in values]
            for name, values in result.items()
            if any(value is not None for value in values)
        }


def thinned(points: list[Point]) -> list[Point]:
    """Join each two points into one that ends with the second: mean over time, larger memory.

    A last point without a partner stays.
    """
    ends = [0.0, *(point[0] or 0.0 for point in points)]
    result = []
    for at in range(0, len(points) - 1, 2):
        weights = (ends[at + 1] - ends[at], ends[at + 2] - ends[at + 1])
        result.append(_joined(points[at], points[at + 1], weights))
    return [*result, *points[len(points) // 2 * 2 :]]


def _joined(point: Point, other: Point, weights: tuple[float, float]) -> Point:
    values: list[float | None] = [other[0]]
    for name, a, b in zip(COLUMNS[1:], point[1:], other[1:], strict=True):
        if a is None or b is None:
            values.append(b if a is None else a)
        elif name.endswith("bytes"):
            values.append(max(a, b))
        else:
            values.append((a * weights[0] + b * weights[1]) / max(sum(weights), 1e-9))
    return tuple(values)


def _used_s() -> float:
    used = 0.0
    for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN):
        usage = resource.getrusage(who)
        used += usage.ru_utime + usage.ru_stime
    return used + sum(cpu_times_ns(pid)[0] for pid in children(os.getpid())) / 1e9


def _machine_s() -> tuple[float, float]:
    times = psutil.cpu_times()
    idle = times.idle + getattr(times, "iowait", 0.0)
    others = ("nice", "irq", "softirq", "steal")  # guests are included in user
    busy = times.user + times.system + sum(getattr(times, name, 0.0) for name in others)
    return busy, busy + idle


def mean_use(points: Mapping[str, Sequence[float | None]]) -> dict[str, float]:
    """Return a job's use by column: the mean over time, and of memory the largest."""
    ends = [item or 0.0 for item in points.get("seconds", ())]
    spans = [end - begin for begin, end in zip([0.0, *ends], ends, strict=False)]
    result = {}
    for name in COLUMNS[1:]:
        known = [
            (value, span)
            for value, span in zip(points.get(name, ()), spans, strict=False)
            if value is not None
        ]
        if name.endswith("bytes") and known:
            result[name] = max(value for value, _ in known)
        elif (whole := sum(span for _, span in known)) > 0:
            result[name] = sum(value * span for value, span in known) / whole
    return result
