"""A predicted number with its interval, and by how much errors elsewhere ask to widen it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from flatout.forecast.collectives import Floats

# Where all draws are the same an interval still has some width, on the scale of logarithms.
_NARROWEST = 1e-4


@dataclass(frozen=True)
class Spreading:
    """A number above 0 that is not known exactly.

    Attributes:
        low, middle, high: its interval, and the median.
    """

    low: float
    middle: float
    high: float

    @classmethod
    def of(cls, draws: Floats, share: float) -> Spreading:
        """From draws: so large a share of them lies within."""
        tail = (1 - share) / 2
        low, middle, high = np.quantile(draws, (tail, 0.5, 1 - tail))
        return cls(float(low), float(middle), float(high))

    def score(self, truth: float) -> float:
        """How far off the truth is: 0 is the middle, 1 the interval's end on that side."""
        end = self.high if truth > self.middle else self.low
        half = max(_NARROWEST, abs(math.log(end / self.middle)))
        return abs(math.log(truth / self.middle)) / half

    def widened(self, factor: float) -> Spreading:
        """With its ends so many times as far from the middle, on the scale of logarithms."""
        return Spreading(
            self.middle * (self.low / self.middle) ** factor,
            self.middle,
            self.middle * (self.high / self.middle) ** factor,
        )

    def times(self, factor: float) -> Spreading:
        """All three by a number above 0."""
        return Spreading(self.low * factor, self.middle * factor, self.high * factor)

    def under(self, number: float) -> Spreading:
        """A number above 0 divided by it."""
        return Spreading(number / self.high, number / self.middle, number / self.low)


def conformal_factor(scores: Sequence[float], share: float) -> float:
    """By how much intervals are to be widened, so that so large a share of truths lies within.

    The quantile of split conformal prediction, ceil((n + 1) share) of n scores; Vovk, Gammerman
    and Shafer, "Algorithmic Learning in a Random World", 2005. It is less than 1 where intervals
    were wider than errors are.
    """
    ordered = sorted(scores)
    place = math.ceil((len(ordered) + 1) * share)
    return ordered[min(place, len(ordered)) - 1]
