"""The time of each part of a step, as lanes.

The loop reads the clock between its lanes and records the durations once per step:

    timeline.start()
    for every step:
        timeline.record(start, input, copy, forward, backward, sync, optimizer, host, samples)
        timeline.add("evaluation", ns)          # time between two steps
    timeline.stop()

The wall time from the first step's start to the last step's end is then split without remainder.
Time that was neither recorded nor added is `idle`. The garbage collector's time is moved from the
lane that it interrupted to `gc`. On a GPU (device_lanes.py) rows are written some steps late, and
the collector's time is part of its lane.
"""

from __future__ import annotations

import struct
import threading
import weakref
from collections.abc import Sequence
from functools import cache
from statistics import median
from time import perf_counter_ns
from typing import Any

import numpy as np
import numpy.typing as npt

from flatout.errors import FlatoutError
from flatout.measure.garbage import CollectorClock

# In the order in which a step passes through them, then the lanes between steps.
LANES = (
    "input",
    "copy",
    "forward",
    "backward",
    "sync",
    "optimizer",
    "host",
    "evaluation",
    "saving",
    "gc",
    "idle",
)
STEP_LANES = LANES[:7]
"""The lanes within a step; the other lanes are between steps."""

_CHUNK = 1024
_ROW = struct.Struct("9q")
_pack_row = _ROW.pack_into


class Timeline:
    """The lanes of one rank's steps. One thread records; any thread may read.

    Args:
        capacity: number of latest steps that are kept individually (72 bytes each), rounded up to
            whole chunks; older ones are only in the totals.
        clock_reads: number of times that the loop reads the clock in each step, for
            `added_us_per_step`: before the first lane and after each of the seven.

    Attributes:
        device: on a GPU, writes the rows; else None.
    """

    device: Any = None

    def __init__(self, capacity: int = 65_536, *, clock_reads: int = 8) -> None:
        if capacity < 1:
            raise FlatoutError(f"capacity must be at least 1 step, not {capacity}")
        self._chunk = min(_CHUNK, capacity)
        self.capacity = -(-capacity // self._chunk) * self._chunk
        self._clock_reads = clock_reads
        self._lock = threading.Lock()
        self._collections = CollectorClock()
        weakref.finalize(self, self._collections.stop)
        self._stopped_at: int | None = None
        self.reset()

    def __getstate__(self) -> dict[str, Any]:
        with self._lock:
            return {k: v for k, v in vars(self).items() if k not in ("_lock", "_buffer", "device")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._lock = threading.Lock()
        self._buffer = self._rows.data
        weakref.finalize(self, self._collections.stop)

    def reset(self) -> None:
        """Forget all recorded steps."""
        if self.device is not None:
            self.device.forget()
        with self._lock:
            # Rows of start, seven durations and samples: a ring, filled in place by struct.
            self._rows = np.zeros((self.capacity, 9), dtype=np.int64)
            self._buffer = self._rows.data
            self._at = 0
            self._fold_at = self._chunk * _ROW.size
            self._folded = 0
            self._rounds = 0
            self._totals = dict.fromkeys(LANES, 0)
            self._first_start: int | None = None
            self._last_end = 0
            self._in_steps = 0
            self._samples = 0
            # Time between steps that was added to a lane. _owned: in earlier gaps. _owned_since: in
            # the gap after step number `_owned_at`.
            self._owned = 0
            self._owned_since = 0
            self._owned_at = 0
            self._collections.noted.clear()

    def start(self) -> None:
        """Begin to time the garbage collector. The pause since `stop()` is no idle time."""
        if self.device is None:
            self._collections.start()
        if self._stopped_at is not None:
            with self._lock:
                self._own(perf_counter_ns() - self._stopped_at)
            self._stopped_at = None

    def stop(self) -> None:
        """End the timing. A second call changes nothing."""
        self.settle()
        self._collections.stop()
        if self._stopped_at is None:
            self._stopped_at = perf_counter_ns()

    def record(
        self,
        start: int,
        input: int,
        copy: int,
        forward: int,
        backward: int,
        sync: int,
        optimizer: int,
        host: int,
        samples: int = 0,
    ) -> None:
        """Record one step: its start on `perf_counter_ns`' clock, then durations, all in ns.

        `samples` is the number of samples that the step trained on, of all ranks; 0 if unknown.
        """
        # Takes a quarter of a microsecond: the row is written to the ring, and sums wait for the
        # chunk.
        at = self._at
        _pack_row(
            self._buffer, at, start, input, copy, forward, backward, sync, optimizer, host, samples
        )
        self._at = at = at + _ROW.size
        if at == self._fold_at:
            self._end_chunk()

    def add(self, lane: str, ns: int) -> None:
        """Add time spent between two steps, as soon as that time has passed.

        Raises:
            FlatoutError: for a lane that cannot be added to.
        """
        if lane not in LANES[:-2]:
            raise FlatoutError(
                f"cannot add to lane {lane!r}", do=f"choose one of {', '.join(LANES[:-2])}"
            )
        self.settle()
        with self._lock:
            collected = min(ns, self._collections.take_since(perf_counter_ns() - ns))
            self._totals[lane] += ns - collected
            self._totals["gc"] += collected
            self._own(ns)

    def settle(self) -> None:
        """Wait for a device that has not finished, so that all steps have their rows."""
        if self.device is not None:
            self.device.settle(wait=True)

    @property
    def steps(self) -> int:
        """Number of recorded steps."""
        return self._rounds * self.capacity + self._at // _ROW.size

    @property
    def behind(self) -> tuple[int, int]:
        """Number of further steps without a row yet, and their number of samples."""
        return (0, 0) if self.device is None else (self.device.steps, self.device.samples)

    @property
    def samples(self) -> int:
        """Number of samples of all steps, including steps that are no longer kept."""
        with self._lock:
            self._fold()
            return self._samples

    def lanes(self) -> dict[str, float]:
        """Return the milliseconds per step by lane, over all steps; zeros without a step."""
        with self._lock:
            self._fold()
            steps = self._rounds * self.capacity + self._folded
            totals = dict(self._totals)
            if self._first_start is not None:
                between = self._last_end - self._first_start - self._in_steps
                totals["idle"] += between - self._owned_within(steps)
        return {lane: max(0, ns) / max(1, steps) / 1e6 for lane, ns in totals.items()}

    def critical_lane(self) -> str | None:
        """Return the lane that takes the most time, or None without a step."""
        if not self.steps:
            return None
        lanes = self.lanes()
        return max(lanes, key=lanes.__getitem__)

    def rows(self) -> npt.NDArray[np.int64]:
        """Return the last `capacity` steps, oldest first, as (steps, 8): start, durations; ns."""
        return self._kept()[:, :8]

    def step_times(self) -> npt.NDArray[np.float64]:
        """Return the durations in seconds of the last `capacity` steps, oldest first (float64)."""
        seconds: npt.NDArray[np.float64] = self.rows()[:, 1:].sum(axis=1) / 1e9
        return seconds

    def step_samples(self) -> npt.NDArray[np.int64]:
        """Return the numbers of samples of the last `capacity` steps (int64)."""
        return self._kept()[:, 8]

    def _kept(self) -> npt.NDArray[np.int64]:
        with self._lock:
            filled = self._at // _ROW.size
            older = self._rows[filled:] if self._rounds else self._rows[:0]
            return np.concatenate([older, self._rows[:filled]])

    def percentiles(self, qs: Sequence[float] = (50, 90, 99)) -> dict[float, float]:
        """Return the percentiles of `step_times()` in seconds; nothing without a step."""
        times = self.step_times()
        if not times.size:
            return {}
        return dict(zip(qs, np.percentile(times, qs).tolist(), strict=True))

    @property
    def added_us_per_step(self) -> float:
        """Microseconds that recording adds to a step.

        The calls are timed directly, on an instance made for that purpose. A comparison of runs
        with and without recording could not resolve the difference.
        """
        return _cost_us(self._clock_reads)

    def as_dict(self) -> dict[str, Any]:
        """Return plain data for JSON: lanes in ms per step, percentiles in ms."""
        return {
            "steps": self.steps,
            "lanes_ms": self.lanes(),
            "critical_lane": self.critical_lane(),
            "step_ms": {f"p{q:g}": value * 1e3 for q, value in self.percentiles().items()},
            "added_us_per_step": self.added_us_per_step,
        }

    def _own(self, ns: int) -> None:
        steps = self.steps
        if steps != self._owned_at:
            self._owned = self._owned_within(steps)
            self._owned_since = 0
            self._owned_at = steps
        self._owned_since += ns

    def _owned_within(self, steps: int) -> int:
        inside = 0 < self._owned_at < steps
        return self._owned + (self._owned_since if inside else 0)

    def _end_chunk(self) -> None:
        with self._lock:
            self._fold()
            if self._at == self.capacity * _ROW.size:
                self._rounds += 1
                self._at = 0
                self._folded = 0
            self._fold_at = self._at + self._chunk * _ROW.size

    def _fold(self) -> None:
        filled = self._at // _ROW.size
        rows = self._rows[self._folded : filled]
        if not len(rows):
            return
        self._folded = filled
        starts = rows[:, 0]
        # ends[i, k] is the time at which step i left its k-th lane.
        ends = starts[:, None] + np.cumsum(rows[:, 1:8], axis=1)
        *sums, samples = rows[:, 1:].sum(axis=0).tolist()
        self._samples += samples
        for lane, ns in zip(STEP_LANES, sums, strict=True):
            self._totals[lane] += ns
        self._in_steps += int((ends[:, -1] - starts).sum())
        if self._first_start is None:
            self._first_start = int(starts[0])
            # Collections before the first step are no part of the span.
            self._collections.take_before(self._first_start)
        self._last_end = int(ends[-1, -1])
        for began, took in self._collections.take_before(self._last_end):
            step = int(np.searchsorted(starts, began, side="right")) - 1
            left = int(np.searchsorted(ends[step], began, side="right")) if step >= 0 else 7
            self._totals[STEP_LANES[left] if left < 7 else "idle"] -= took
            self._totals["gc"] += took


@cache
def _cost_us(clock_reads: int) -> float:
    count = 2 * _CHUNK
    rounds = []
    for _ in range(5):
        record = Timeline(capacity=count).record
        began = perf_counter_ns()
        for _ in range(count):
            record(began, 20_000, 1_000, 30_000, 60_000, 0, 25_000, 4_000)
        recorded = perf_counter_ns()
        for _ in range(count):
            perf_counter_ns()
        read = perf_counter_ns()
        rounds.append((recorded - began + clock_reads * (read - recorded)) / count / 1e3)
    return median(rounds)
