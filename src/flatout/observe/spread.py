"""Ends between which the columns of a table lie, which reveal how the table was scaled.

Scaling by minimum and maximum leaves 0 and 1, or -1 and 1, as the ends of each column. Scaling by
the median leaves a median of 0. All of this can be accumulated over the parts of a table.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

# _COLUMNS: maximum number of columns of a table, since wider rows are images or features of a
# model; _ASKED: number of rows in which different values are counted.
_COLUMNS, _ASKED = 512, 1024
# Minimum number of different values of a measured column; columns with fewer hold classes or
# counts.
_DIFFERENT = 32
# _AT_END: tolerance at the end of a scaled range; _OFTEN: maximum number of a column's rows that
# reach an end; _MISSES: smallest distance from an end that counts as missed.
_AT_END, _OFTEN, _MISSES = 1e-6, 3, 5e-3
# _SCALED: minimum share of measured columns that lie in a range; _REACHED: minimum share of the
# range's ends that columns reach, since test data that are not recorded may reach the other ends;
# _FEWEST: minimum number of ends that are reached.
_SCALED, _REACHED, _FEWEST = 0.5, 0.6, 3
# Smallest shares of columns that reach an end in few rows. _LOW_SELDOM: share of the columns that
# reach the lower end; _HIGH_SELDOM: share of the columns that reach the upper end. Many columns
# hold zeros, and pixels are often black or white.
_LOW_SELDOM, _HIGH_SELDOM = 1 / 3, 2 / 3
# Tolerance of the mean and variance of evenly spaced numbers, such as ranks and times.
_EVEN = 2e-3
# Minimum share of the columns whose median over the training rows alone differs from zero.
_OTHERS = 0.5
# Tolerances of a median between the two numbers nearest to zero. _MIDDLE: as a share of the gap
# between them; _ROUNDED: absolute, since scaled numbers are rounded.
_MIDDLE, _ROUNDED = 1e-2, 1e-5


@dataclass(frozen=True)
class Spread:
    """Ends and counts of a table's columns; each attribute but `count` has an entry per column.

    Attributes:
        count: number of rows.
        low, high: smallest and largest value.
        at_low, at_high: number of rows with the smallest value and with the largest value.
        below, above: number of negative and of positive values.
        nearest_below, nearest_above: negative and positive number nearest to zero; infinite
            without one.
        different: number of different values in some of the rows.
    """

    count: int
    low: Any
    high: Any
    at_low: Any
    at_high: Any
    below: Any
    above: Any
    nearest_below: Any
    nearest_above: Any
    different: Any

    def with_others(self, other: Spread) -> Spread:
        """Return the Spread of the rows of both tables together."""
        import numpy as np

        low, high = np.minimum(self.low, other.low), np.maximum(self.high, other.high)
        parts = (self, other)
        return Spread(
            self.count + other.count,
            low,
            high,
            sum((item.low == low) * item.at_low for item in parts),
            sum((item.high == high) * item.at_high for item in parts),
            self.below + other.below,
            self.above + other.above,
            np.maximum(self.nearest_below, other.nearest_below),
            np.minimum(self.nearest_above, other.nearest_above),
            np.maximum(self.different, other.different),
        )

    def whole(self) -> Spread:
        """Return the Spread of all numbers, as of a single column."""
        low, high = self.low.min(keepdims=True), self.high.max(keepdims=True)
        return Spread(
            self.count * self.low.size,
            low,
            high,
            self.at_low[self.low == low].sum(keepdims=True),
            self.at_high[self.high == high].sum(keepdims=True),
            self.below.sum(keepdims=True),
            self.above.sum(keepdims=True),
            self.nearest_below.max(keepdims=True),
            self.nearest_above.min(keepdims=True),
            self.different.max(keepdims=True),
        )

    @property
    def is_median(self) -> Any:
        """Columns whose median is zero, by any definition of the median; an array of booleans."""
        import numpy as np

        half = self.count / 2
        is_there = (self.below + self.above < self.count) & (self.below <= half)
        with np.errstate(invalid="ignore"):  # infinite where no values lie below or above zero
            gap = self.nearest_above - self.nearest_below
            middle = abs(self.nearest_above + self.nearest_below)
        is_between = (
            (self.below == half) & (self.above == half) & (middle <= _MIDDLE * gap + _ROUNDED)
        )
        return (is_there & (self.above <= half)) | is_between


def spread_of(rows: Any) -> Spread | None:
    """Return the Spread of an array of floats, rows by columns; None for wide rows."""
    import numpy as np

    if rows.shape[1] > _COLUMNS or not len(rows):
        return None
    low, high = rows.min(0), rows.max(0)
    is_below, is_above = rows < 0, rows > 0
    ordered = np.sort(rows[:_ASKED], axis=0)
    return Spread(
        len(rows),
        low.astype("float64"),
        high.astype("float64"),
        (rows == low).sum(0),
        (rows == high).sum(0),
        is_below.sum(0),
        is_above.sum(0),
        np.where(is_below, rows, -np.inf).max(0).astype("float64"),
        np.where(is_above, rows, np.inf).min(0).astype("float64"),
        1 + (ordered[1:] != ordered[:-1]).sum(0),
    )


def missed_end(alone: Spread, both: Spread, mean: Any, variance: Any) -> float | None:
    """Return the largest distance of the training rows from an end that only all rows reach.

    None where the rows do not look scaled to that end.
    """
    measures = (both.different > _DIFFERENT) & ~_is_even(both, mean, variance)
    for ends in ((0.0, 1.0), (-1.0, 1.0)):
        missed = _missed(alone, both, measures, ends)
        if missed is None:
            whole = both.whole()
            is_seldom = max(whole.at_low.item(), whole.at_high.item()) <= _OFTEN
            one = whole.different > _DIFFERENT
            missed = _missed(alone.whole(), whole, one, ends, fewest=2) if is_seldom else None
        if missed is not None:
            return missed
    return None


def _missed(
    alone: Spread, both: Spread, measures: Any, ends: tuple[float, float], fewest: int = _FEWEST
) -> float | None:
    low, high = ends
    inside = measures & (both.low >= low - _AT_END) & (both.high <= high + _AT_END)
    count = int(inside.sum())
    if not count or count < _SCALED * measures.sum():
        return None
    at_low = inside & (both.low <= low + _AT_END)
    at_high = inside & (both.high >= high - _AT_END)
    seldom_low, seldom_high = (
        at_low & (both.at_low <= _OFTEN),
        at_high & (both.at_high <= _OFTEN),
    )
    reached = int(at_low.sum() + at_high.sum())
    is_scaled = (
        reached >= max(fewest, 2 * _REACHED * count)
        and seldom_low.sum() + seldom_high.sum() >= fewest
        and seldom_low.sum() >= _LOW_SELDOM * at_low.sum()
        and seldom_high.sum() >= _HIGH_SELDOM * at_high.sum()
    )
    if not is_scaled:
        return None
    distances = [*(alone.low - low)[seldom_low], *(high - alone.high)[seldom_high]]
    farthest = float(max(distances, default=0.0))
    return farthest if farthest > _MISSES else None


def _is_even(spread: Spread, mean: Any, variance: Any) -> Any:
    wide = spread.high - spread.low
    even = wide**2 * (spread.count + 1) / (12 * max(1, spread.count - 1))
    is_middle = abs(mean - (spread.low + spread.high) / 2) <= _EVEN * wide
    return is_middle & (abs(variance - even) <= _EVEN * even)


def has_median(alone: Spread, both: Spread) -> bool:
    """Return whether measured columns have median 0 over all rows, but not in training alone."""
    measures = both.different > _DIFFERENT
    count = int(measures.sum())
    if count < 2 or not both.is_median[measures].all():
        return False
    return bool((~alone.is_median[measures]).sum() > _OTHERS * count)


def held_ends(alone: Spread, both: Spread, figures: Iterable[Any]) -> float | None:
    """Return the largest distance of the training rows from an end of all rows.

    None unless `figures` contain both ends of all rows, or the lower end and the distance between
    the ends.
    """
    known = list(figures)
    wide = both.high - both.low
    varied = wide > 0
    if not varied.any():
        return None

    def has(wanted: Any) -> bool:
        return any(bool((abs(item - wanted) <= _AT_END * wide)[varied].all()) for item in known)

    if not (has(both.low) and (has(both.high) or has(wide))):
        return None
    apart = [*((alone.low - both.low) / wide)[varied], *((both.high - alone.high) / wide)[varied]]
    farthest = float(max(apart))
    return farthest if farthest > _MISSES else None
