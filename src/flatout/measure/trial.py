"""Comparison of the speeds of A and B: paired interleaved blocks, an interval, and a noise floor.

A machine drifts (clocks, heat, neighbors), so A and B run in short blocks in the order A B B A.
Each such quadruple (a1, b1, b2, a2), in seconds per step, gives one log-ratio in which a steady
drift cancels:

    r = (log a1 + log a2 - log b1 - log b2) / 2

The trial's ratio is exp(median of r): time A / time B, so above 1 means that B is faster. Its 95%
interval is the percentile bootstrap over quadruples (Efron 1979, "Bootstrap methods: another look
at the jackknife"). Over five quadruples or fewer that is simply their range.

The floor is the size of a ratio that this trial would have shown with A against A. It comes from
the differences d between blocks of one configuration, a1 against a2 and b1 against b2 (in logs).
Without any effect, r is distributed like (±d ± d') / 2 for two such differences drawn with random
signs. The floor redraws as many r as the trial has quadruples, takes their median, and repeats
this. It is the 95th percentile of the size of these medians, as exp(.) - 1. A steady drift cancels
in r but not in d: the floor errs to the safe side.

B wins only if the whole interval is above the floor. In simulation, with normal noise and one block
in ten delayed, A against A wins in fewer than 5% of the trials. It loses in as few. This holds
whether trials stop early or not. Differences between processes are not in the floor: two equal
models in one process may differ by some percent for its whole life. Close ratios need several
processes, and `bootstrap_ratio`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from flatout.errors import FlatoutError

_Array = npt.NDArray[np.float64]
_Side = TypeVar("_Side")

_RESAMPLES = 2000
_CONFIDENCE = 0.95


class Interval(NamedTuple):
    """A ratio `mid` with its 95% interval from `low` to `high`."""

    low: float
    mid: float
    high: float


@dataclass(frozen=True)
class TrialResult:
    """The result of a trial of A against B.

    Args:
        ratio: time A / time B; above 1 means that B is faster.
        low: lower end of the ratio's 95% interval; for a single quadruple, the floor below it.
        high: upper end of the ratio's 95% interval; for a single quadruple, the floor above it.
        floor: largest distance from 1 of the ratio of A against A by noise alone: 0.01 is 1%.
        pairs: number of quadruples A B B A that were run.
        a_median, b_median: over the blocks of A and of B, in seconds per step.
    """

    ratio: float
    low: float
    high: float
    floor: float
    pairs: int
    a_median: float
    b_median: float
    seconds: float

    @property
    def wins(self) -> bool:
        """True if B is faster than A beyond the floor. A single quadruple proves nothing."""
        return self.pairs > 1 and self.low > 1 + self.floor

    @property
    def loses(self) -> bool:
        """True if B is slower than A beyond the floor. A single quadruple proves nothing."""
        return self.pairs > 1 and self.high < 1 - self.floor

    @property
    def is_tie(self) -> bool:
        """True if no difference is visible. A single quadruple cannot show that."""
        return self.pairs > 1 and 1 - self.floor <= self.low <= self.high <= 1 + self.floor

    @property
    def step_s(self) -> tuple[float, float]:
        """Seconds per step of A and of B, whose ratio is the trial's.

        Their geometric mean is that of the medians. The ratio of the medians differs from the
        trial's if quadruples differ more from each other than their sides do, for example on a
        machine that becomes slower.
        """
        middle = math.sqrt(self.a_median * self.b_median)
        return middle * math.sqrt(self.ratio), middle / math.sqrt(self.ratio)

    @property
    def figures(self) -> dict[str, Any]:
        """Return plain data for a record: `ratio`, `low`, `high`, `floor` and `pairs`."""
        names = ("ratio", "low", "high", "floor", "pairs")
        return {name: getattr(self, name) for name in names}

    @property
    def words(self) -> str:
        """Describe the result in one phrase, such as `1.19x [1.17,1.21] (A/A ±0.9%)`."""
        interval = f"[{self.low:.2f},{self.high:.2f}]"
        return f"{self.ratio:.2f}x {interval} (A/A ±{self.floor:.1%})"


def run_trial(
    measure_a: Callable[[], float],
    measure_b: Callable[[], float],
    *,
    max_pairs: int = 8,
    min_pairs: int = 2,
    deadline_s: float = math.inf,
    floor: float = 0.0,
    precision: float = math.inf,
    seed: int = 0,
    clock: Callable[[], float] = time.perf_counter,
) -> TrialResult:
    """Measure A against B in quadruples A B B A until the answer is clear.

    The answer is clear, from `min_pairs` quadruples on, in two cases. The interval is beyond the
    floor on one side (B wins or loses), and as precise as requested. Or it is wholly within the
    floor (no difference that this trial could detect).

    Args:
        measure_a: runs one block of steps in configuration A, after switching and warming up, and
            returns its seconds per step.
        measure_b: the same for B.
        max_pairs: maximum number of quadruples.
        min_pairs: fewest quadruples, unless the deadline comes first.
        deadline_s: no quadruple begins that would end, at the pace of the slowest so far, later
            than this number of seconds after the start. The first always runs.
        floor: a floor known in advance; the larger of it and the trial's own counts.
        precision: largest distance between the ends of the interval of a clear answer: 0.05 is 5%.

    Raises:
        FlatoutError: a block's time is not a positive number, or the numbers of pairs make no
            sense.
    """
    if not 1 <= min_pairs <= max_pairs:
        raise FlatoutError(
            f"min_pairs and max_pairs must satisfy 1 <= {min_pairs} <= {max_pairs}",
            do="give at least one pair, and max_pairs no smaller than min_pairs",
        )
    blocks = quadruples(
        measure_a,
        measure_b,
        max_pairs=max_pairs,
        min_pairs=min_pairs,
        deadline_s=deadline_s,
        floor=floor,
        precision=precision,
        seed=seed,
        clock=clock,
    )
    measure = next(blocks)
    while True:
        seconds = measure()
        try:
            measure = blocks.send(seconds)
        except StopIteration as end:
            result: TrialResult = end.value
            return result


def quadruples(
    a: _Side,
    b: _Side,
    *,
    max_pairs: int = 8,
    min_pairs: int = 2,
    deadline_s: float = math.inf,
    floor: float = 0.0,
    precision: float = math.inf,
    enough: Callable[[TrialResult], bool] = lambda result: False,
    seed: int = 0,
    clock: Callable[[], float] = time.perf_counter,
) -> Generator[_Side, float, TrialResult]:
    """Run the trial of `run_trial` for a caller that runs the blocks itself.

    Yields the configuration of the next block, takes its seconds per step by `send`, and returns
    the result.

    Args:
        enough: called after each quadruple, from the first on; True ends the trial.

    Raises:
        FlatoutError: a block's time is not a positive number.
    """
    began = clock()
    slowest = 0.0
    of_a: list[tuple[float, float]] = []
    of_b: list[tuple[float, float]] = []
    while True:
        quadruple_began = clock()
        a1 = _checked((yield a), "A")
        b1 = _checked((yield b), "B")
        b2 = _checked((yield b), "B")
        a2 = _checked((yield a), "A")
        of_a.append((a1, a2))
        of_b.append((b1, b2))
        now = clock()
        slowest = max(slowest, now - quadruple_began)
        result = _judge(np.array(of_a), np.array(of_b), floor, seed, now - began)
        is_precise = result.high <= result.low * (1 + precision)
        settled = ((result.wins or result.loses) and is_precise) or result.is_tie
        if len(of_a) >= max_pairs or now - began + slowest > deadline_s or enough(result):
            return result
        if len(of_a) >= min_pairs and settled:
            return result


def bootstrap_paired(a: npt.ArrayLike, b: npt.ArrayLike, *, seed: int = 0) -> Interval:
    times_a, times_b = _times(a, "a"), _times(b, "b")
    pairs = len(times_a)
    if pairs != len(times_b):
        raise FlatoutError(f"times in pairs differ in number: {pairs} of a, {len(times_b)} of b")
    logs_a = np.log(times_a).reshape(pairs, -1).mean(axis=1)
    logs_b = np.log(times_b).reshape(pairs, -1).mean(axis=1)
    ratios = logs_a - logs_b
    generator = np.random.default_rng(seed)
    return _interval(float(np.median(ratios)), _resampled_medians(ratios, generator))


def bootstrap_ratio(a: npt.ArrayLike, b: npt.ArrayLike, *, seed: int = 0) -> Interval:
    """Return median(a) / median(b) of times that are not paired, with its 95% interval.

    For restarts of processes, with one value for each process. Both sides are resampled
    independently.

    Raises:
        FlatoutError: there are no times, or a time is not a positive number.
    """
    times_a, times_b = _times(a, "a"), _times(b, "b")
    generator = np.random.default_rng(seed)
    resampled_a = _resampled_medians(times_a, generator)
    resampled_b = _resampled_medians(times_b, generator)
    middle = float(np.log(np.median(times_a) / np.median(times_b)))
    return _interval(middle, np.log(resampled_a / resampled_b))


def _judge(a: _Array, b: _Array, floor: float, seed: int, seconds: float) -> TrialResult:
    low, ratio, high = bootstrap_paired(a, b, seed=seed)
    floor = max(floor, _floor(a, b, seed))
    if len(a) == 1:  # with one value there is nothing to resample; only its own noise is known
        low, high = ratio / (1 + floor), ratio * (1 + floor)
    return TrialResult(
        ratio=ratio,
        low=low,
        high=high,
        floor=floor,
        pairs=len(a),
        a_median=float(np.median(a)),
        b_median=float(np.median(b)),
        seconds=seconds,
    )


def _floor(a: _Array, b: _Array, seed: int) -> float:
    generator = np.random.default_rng(seed)
    within = np.concatenate([np.log(a[:, 0] / a[:, 1]), np.log(b[:, 0] / b[:, 1])])
    shape = (_RESAMPLES, len(a), 2)
    drawn = generator.choice(within, shape) * generator.choice([-1.0, 1.0], shape)
    noise = np.abs(np.median(drawn.mean(axis=2), axis=1))
    return float(np.expm1(np.quantile(noise, _CONFIDENCE)))


def _resampled_medians(values: _Array, generator: np.random.Generator) -> _Array:
    drawn = generator.integers(0, len(values), (_RESAMPLES, len(values)))
    medians: _Array = np.median(values[drawn], axis=1)
    return medians


def _interval(middle: float, resampled: _Array) -> Interval:
    tail = (1 - _CONFIDENCE) / 2
    low, high = np.quantile(resampled, [tail, 1 - tail])
    return Interval(float(np.exp(low)), float(np.exp(middle)), float(np.exp(high)))


def _times(values: npt.ArrayLike, name: str) -> _Array:
    times = np.asarray(values, dtype=np.float64)
    if not times.size:
        raise FlatoutError(f"no times given for {name}")
    wrong = times[~(np.isfinite(times) & (times > 0))]
    if wrong.size:
        raise FlatoutError(f"times must be positive numbers, found {wrong[0]} in {name}")
    return times


def _checked(seconds: float, name: str) -> float:
    if not (math.isfinite(seconds) and seconds > 0):
        raise FlatoutError(
            f"a block's seconds per step must be a positive number, not {seconds}",
            where=f"configuration {name}",
        )
    return float(seconds)
