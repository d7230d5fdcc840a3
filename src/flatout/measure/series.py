"""The median duration of consecutive steps, and its confidence interval.

Consecutive steps are correlated (a neighbor's load, clocks, a queue that drains), so resampling
single steps would give far too narrow an interval. They are resampled in blocks instead (the block
bootstrap: Künsch 1989, "The jackknife and the bootstrap for general stationary observations";
wrapped around the end: Politis and Romano 1992, "A circular block-resampling procedure for
stationary data").

The length of blocks follows from the range of the correlation. The rule is by Politis and White
2004, "Automatic block-length selection for the dependent bootstrap", with the correction of Patton,
Politis and White 2009. It is computed on the series of whether a step is above the median, because
that moves a median.

A percentile interval over few blocks is too narrow. It is widened as Student's t is wider than the
normal (the expanded percentile interval: Hesterberg 2015, "What teachers should know about the
bootstrap").
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from flatout.measure.trial import Interval

_RESAMPLES = 1_000
_CONFIDENCE = 0.95
_CALM_LAGS = 5
_Z = NormalDist().inv_cdf((1 + _CONFIDENCE) / 2)

_Array = npt.NDArray[np.float64]


def median_of(steps: Sequence[float], *, seed: int = 0) -> Interval:
    """Return the median of consecutive steps with its 95% interval.

    Args:
        steps: durations in order, any unit; at least one, all above 0.
    """
    values = np.asarray(steps, dtype=np.float64)
    generator = np.random.default_rng(seed)
    return _interval(
        float(np.log(np.median(values))),
        np.log(_resampled_medians(values, generator)),
        _blocks(values),
    )


def ratio_of_medians(
    kept: Sequence[Sequence[float]], new: Sequence[float], *, seed: int = 0
) -> Interval:
    """Return the median of `new` over that of `kept`, with its 95% interval.

    Args:
        kept: durations in order of each kept run, any unit; for several runs the geometric mean of
            their medians counts.
        new: durations in order of the new run, same unit.
    """
    generator = np.random.default_rng(seed)
    runs = [np.asarray(run, dtype=np.float64) for run in kept]
    steps = np.asarray(new, dtype=np.float64)
    middle = np.log(np.median(steps)) - np.mean([np.log(np.median(run)) for run in runs])
    resampled = np.log(_resampled_medians(steps, generator)) - np.mean(
        [np.log(_resampled_medians(run, generator)) for run in runs], axis=0
    )
    return _interval(float(middle), resampled, min(map(_blocks, [steps, *runs])))


def _interval(middle: float, resampled: _Array, blocks: float) -> Interval:
    tail = (1 - _CONFIDENCE) / 2
    ends = np.quantile(resampled, [tail, 1 - tail])
    low, high = middle + _expansion(blocks) * (ends - middle)
    return Interval(*(float(np.exp(value)) for value in (low, middle, high)))


def _expansion(blocks: float) -> float:
    freedom = max(blocks - 1, 2.0)
    return student_t(freedom) / _Z * math.sqrt((freedom + 1) / freedom)


def student_t(freedom: float) -> float:
    """Return the 97.5% quantile of Student's t, within 4% from 3 degrees of freedom on.

    Uses the expansion in Abramowitz and Stegun 1964, 26.7.5.
    """
    z = _Z
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)


def _blocks(values: _Array) -> float:
    return len(values) / block_length(values)


def _resampled_medians(values: _Array, generator: np.random.Generator) -> _Array:
    count, block = len(values), block_length(values)
    begins = generator.integers(0, count, (_RESAMPLES, -(-count // block)))
    drawn = (begins[:, :, None] + np.arange(block)).reshape(_RESAMPLES, -1)[:, :count]
    wrapped = np.concatenate([values, values[:block]])
    medians: _Array = np.median(wrapped[drawn], axis=1)
    return medians


def block_length(values: npt.ArrayLike) -> int:
    """Return the number of consecutive values in a block that keeps their correlation.

    The rule of Politis and White (2004), corrected in 2009, for blocks that wrap around. It is
    applied to the series of whether a value is above the median. Returns 1 if values are not
    correlated.
    """
    series = np.asarray(values, dtype=np.float64)
    count = len(series)
    if count < 2 * _CALM_LAGS:
        return 1
    above = np.sign(series - np.median(series))
    above -= above.mean()
    furthest = min(count - 1, math.ceil(math.sqrt(count)) + _CALM_LAGS)
    covariance = np.array([above[: count - lag] @ above[lag:] for lag in range(furthest + 1)])
    if covariance[0] <= 0:
        return 1
    reach = _reach(covariance[1:] / covariance[0], count)
    width = min(2 * max(reach, 1), furthest)
    lags = np.arange(-width, width + 1)
    window = np.clip(2 * (1 - np.abs(lags) / width), 0, 1)  # flat, then falling to 0
    weighted = window * covariance[np.abs(lags)]
    slope, level = float(weighted @ np.abs(lags)), float(weighted.sum())
    if level <= 0:
        return 1
    length = (1.5 * (slope / level) ** 2 * count) ** (1 / 3)
    longest = min(3 * math.sqrt(count), count / 3)
    return max(1, math.ceil(float(min(length, longest))))


def _reach(correlation: _Array, count: int) -> int:
    small = np.abs(correlation) < 2 * math.sqrt(math.log10(count) / count)
    for lag in range(len(small) - _CALM_LAGS + 1):
        if small[lag : lag + _CALM_LAGS].all():
            return lag
    return int(np.flatnonzero(~small)[-1]) + 1
