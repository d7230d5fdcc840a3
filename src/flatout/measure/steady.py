"""Detection of growth that continues from one measurement to the next, in contrast to jumps.

A line with jumps is compared with stairs without a slope. Each has as many jumps as pay for their
explanation (Schwarz 1978, "Estimating the dimension of a model"). Jumps are found one after the
other, each where it explains most (binary segmentation: Vostrikova 1981, "Detecting disorder in
multidimensional random processes").

Many jumps of a few times the noise cost more than they explain in addition to a line. So the
residuals of a smooth curve are put into another order. If levels then explain clearly less than
before, there are levels (a permutation test: Good 2005, "Permutation, Parametric and Bootstrap
Tests of Hypotheses").
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

_JUMPS = 24
# Least difference by which Schwarz's criterion of the line must be lower than that of stairs:
# "strong" in Kass and Raftery 1995, "Bayes factors".
_CLEARLY = 6.0
# Limits of the slope between jumps. _DEVIATIONS: least slope in its standard deviations. _LEFT:
# least slope as a share of the overall slope. _STAYS: least overall slope as a share of this slope,
# because a value that is cleared at times grows in between.
_DEVIATIONS, _LEFT, _STAYS = 2.0, 0.5, 0.3
# _ORDERS: number of other orders that are tried. _LEVELS: least difference of the criterion by
# which levels must explain the measured order better: "positive" in Kass and Raftery.
_ORDERS, _LEVELS = 9, 4.0
_POWERS = 4  # number of powers in a smooth curve: a cubic


class _Squares(NamedTuple):
    """Sums over parts, each around its own mean: squares of places, products, squares of values."""

    places: float
    products: float
    values: float

    @property
    def slope(self) -> float:
        return self.products / self.places if self.places > 0 else 0.0

    def left(self, *, sloped: bool) -> float:
        return max(0.0, self.values - (self.products * self.slope if sloped else 0.0))


def grows_steadily(places: Sequence[float], values: Sequence[float], noise: float) -> bool:
    """Return whether values grow from each place to the next, apart from jumps between levels.

    Args:
        noise: the least variance of a single value.
    """
    count = len(values)
    most = min(_JUMPS, (count - 2) // 2)
    if most < 0:
        return False
    score, line, fitted = _best_line(places, values, most, noise)
    levels = _of_levels(places, values, most, noise)
    if levels - score < _CLEARLY or not line:
        return False
    curve = _curve(places, values)
    left = sum((value - at) ** 2 for value, at in zip(values, curve, strict=True)) / count
    if _criterion(left, _POWERS, count, noise) < score:
        fitted = curve
    return not _has_levels(places, values, fitted, most, noise, levels)


def _best_line(
    places: Sequence[float], values: Sequence[float], most: int, noise: float
) -> tuple[float, bool, list[float]]:
    count = len(values)
    lines = list(_fits(places, values, most, sloped=True))
    score, jumps = min((_score(of, at, count, noise, True), at) for at, (of, _) in enumerate(lines))
    (around, cuts), whole = lines[jumps], lines[0][0].slope
    variance = max(around.left(sloped=True) / max(1, count - jumps - 2), noise)
    is_sure = around.slope > _DEVIATIONS * math.sqrt(variance / around.places)
    rises = is_sure and _LEFT * whole <= around.slope <= whole / _STAYS
    line = []
    for begin, end in pairwise(cuts):
        place, value = (sum(of[begin:end]) / (end - begin) for of in (places, values))
        line += [value + around.slope * (at - place) for at in places[begin:end]]
    return score, rises, line


def _of_levels(places: Sequence[float], values: Sequence[float], most: int, noise: float) -> float:
    stairs = _fits(places, values, most, sloped=False)
    return min(_score(of, at, len(values), noise, False) for at, (of, _) in enumerate(stairs))


def _has_levels(
    places: Sequence[float],
    values: Sequence[float],
    fitted: list[float],
    most: int,
    noise: float,
    levels: float,
) -> bool:
    left = [value - at for value, at in zip(values, fitted, strict=True)]
    draws = random.Random(0)
    for _ in range(_ORDERS):
        draws.shuffle(left)
        other = [at + off for at, off in zip(fitted, left, strict=True)]
        if _of_levels(places, other, most, noise) <= levels + _LEVELS:
            return False
    return True


def _curve(places: Sequence[float], values: Sequence[float]) -> list[float]:
    middle, half = (places[0] + places[-1]) / 2, (places[-1] - places[0]) / 2 or 1.0
    known: list[list[float]] = []
    result = [0.0] * len(values)
    for power in range(_POWERS):
        basis = [((place - middle) / half) ** power for place in places]
        for other in known:
            share = _product(basis, other)
            basis = [a - share * b for a, b in zip(basis, other, strict=True)]
        norm = math.hypot(*basis)
        if norm < 1e-9:  # there are fewer places than powers
            break
        known.append([item / norm for item in basis])
        share = _product(known[-1], values)
        result = [a + share * b for a, b in zip(result, known[-1], strict=True)]
    return result


def _product(one: Sequence[float], other: Sequence[float]) -> float:
    return sum(a * b for a, b in zip(one, other, strict=True))


def _score(squares: _Squares, jumps: int, count: int, noise: float, sloped: bool) -> float:
    return _criterion(squares.left(sloped=sloped) / count, 2 * jumps + 1 + sloped, count, noise)


def _criterion(variance: float, parameters: int, count: int, noise: float) -> float:
    return count * math.log(max(variance, noise, 1e-300)) + parameters * math.log(count)


def _fits(
    places: Sequence[float], values: Sequence[float], most: int, *, sloped: bool
) -> Iterator[tuple[_Squares, list[int]]]:
    sums = _running_sums(places, values)
    cuts = [0, len(values)]
    whole = _part(sums, 0, len(values))
    yield whole, cuts
    for _ in range(most):
        cut = [
            (_cut(sums, whole, begin, at, end), at)
            for begin, end in pairwise(cuts)
            for at in range(begin + 1, end)
        ]
        whole, at = min(cut, key=lambda item: item[0].left(sloped=sloped))
        cuts = sorted([*cuts, at])
        yield whole, cuts


def _running_sums(places: Sequence[float], values: Sequence[float]) -> list[tuple[float, ...]]:
    count = len(values)
    place, value = sum(places) / count, sum(values) / count  # keeps digits of the squares
    result: list[tuple[float, ...]] = [(0.0,) * 5]
    for x, y in zip(places, values, strict=True):
        x, y = x - place, y - value
        more = (x, y, x * x, x * y, y * y)
        result.append(tuple(a + b for a, b in zip(result[-1], more, strict=True)))
    return result


def _part(sums: list[tuple[float, ...]], begin: int, end: int) -> _Squares:
    count = end - begin
    x, y, xx, xy, yy = (b - a for a, b in zip(sums[begin], sums[end], strict=True))
    return _Squares(xx - x * x / count, xy - x * y / count, yy - y * y / count)


def _cut(sums: list[tuple[float, ...]], whole: _Squares, begin: int, at: int, end: int) -> _Squares:
    one, first, second = _part(sums, begin, end), _part(sums, begin, at), _part(sums, at, end)
    each = zip(whole, one, first, second, strict=True)
    return _Squares(*(all_ - before + left + right for all_, before, left, right in each))
