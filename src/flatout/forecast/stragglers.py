"""How much longer the slowest of N ranks takes than a rank on the average."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from statistics import NormalDist

import numpy as np
import numpy.typing as npt


def expected_maximum(values: Sequence[float] | npt.NDArray[np.float64], draws: int) -> float:
    """Of so many draws with replacement, exactly: the bootstrap's limit.

    The i-th smallest of n values is the maximum with probability (i/n)^N - ((i-1)/n)^N.
    """
    ordered = np.sort(np.asarray(values, float))
    below = np.linspace(0.0, 1.0, len(ordered) + 1) ** draws
    return float(np.diff(below) @ ordered)


@cache
def normal_maximum(draws: int) -> float:
    """Of so many standard normal draws (Blom, "Statistical Estimates", 1958)."""
    return 0.0 if draws == 1 else NormalDist().inv_cdf((draws - 0.375) / (draws + 0.25))


class Spread:
    """Of a rank's steps, from the steps of a run, or normal where there are none."""

    def __init__(self, steps: Sequence[float] | None = None) -> None:
        self._steps = None
        if steps is not None and len(steps) >= 10:
            result = np.asarray(steps, float)
            self._steps = result / result.mean()

    @property
    def is_measured(self) -> bool:
        """Whether it is from steps."""
        return self._steps is not None

    def excess(self, ranks: int) -> float:
        """The expected maximum of so many ranks beyond the mean.

        As a share of a step where it is measured, in standard deviations where not.
        """
        if self._steps is None:
            return normal_maximum(ranks)
        return expected_maximum(self._steps, ranks) - 1.0
