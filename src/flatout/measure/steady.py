"""Growth that goes on from one measurement to the next, told apart from a few jumps.

A line with jumps is held against stairs without a slope, each with as many jumps as pay for what
they explain (Schwarz 1978, "Estimating the dimension of a model"). Jumps are looked for one after
the other, each where it explains most (binary segmentation: Vostrikova 1981, "Detecting disorder in
multidimensional random processes").
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

_JUMPS = 12
# By so much Schwarz's criterion of the line has to be lower: "strong" in Kass and Raftery 1995,
# "Bayes factors".
_CLEARLY = 6.0
# The slope beside jumps lies so many of its standard deviations above zero, and is so large a share
# of the slope over all.
_DEVIATIONS, _LEFT = 2.0, 0.5


class _Squares(NamedTuple):
    """Sums over parts, each around its own mean: squares of places, products, squares of values."""

    places: float
    products: float
    values: float

    @property
    def slope(self) -> float:
        """That all parts have in common."""
        return self.products / self.places if self.places > 0 else 0.0

    def left(self, *, sloped: bool) -> float:
        """Squares that the means explain not, with `sloped` nor a slope in common."""
        return max(0.0, self.values - (self.products * self.slope if sloped else 0.0))


def grows_steadily(places: Sequence[float], values: Sequence[float], noise: float) -> bool:
    """Return whether values grow from each place to the next, beside all jumps between levels.

    Args:
        places: where each was measured, in order.
        values: what was measured.
        noise: the least variance of a single value.
    """
    count = len(values)
    most = min(_JUMPS, (count - 2) // 2)
    if most < 0:
        return False
    line = list(_fits(places, values, most, sloped=True))
    stairs = list(_fits(places, values, most, sloped=False))
    score, jumps = min((_score(of, at, count, noise, True), at) for at, of in enumerate(line))
    least = min(_score(of, at, count, noise, False) for at, of in enumerate(stairs))
    if least - score < _CLEARLY:
        return False
    around = line[jumps]
    variance = max(around.left(sloped=True) / max(1, count - jumps - 2), noise)
    is_sure = around.slope > _DEVIATIONS * math.sqrt(variance / around.places)
    return is_sure and around.slope >= _LEFT * line[0].slope


def _score(squares: _Squares, jumps: int, count: int, noise: float, sloped: bool) -> float:
    """Schwarz's criterion: a jump has a place and a height."""
    variance = max(squares.left(sloped=sloped) / count, noise, 1e-300)
    return count * math.log(variance) + (2 * jumps + 1 + sloped) * math.log(count)


def _fits(
    places: Sequence[float], values: Sequence[float], most: int, *, sloped: bool
) -> Iterator[_Squares]:
    """What is left around a line or a level with 0, 1, 2 and up to so many jumps."""
    sums = _running_sums(places, values)
    cuts = [0, len(values)]
    whole = _part(sums, 0, len(values))
    yield whole
    for _ in range(most):
        cut = [
            (_cut(sums, whole, begin, at, end), at)
            for begin, end in pairwise(cuts)
            for at in range(begin + 1, end)
        ]
        whole, at = min(cut, key=lambda item: item[0].left(sloped=sloped))
        cuts = sorted([*cuts, at])
        yield whole


def _running_sums(places: Sequence[float], values: Sequence[float]) -> list[tuple[float, ...]]:
    """Of places, values, and their products, up to each."""
    count = len(values)
    place, value = sum(places) / count, sum(values) / count  # lest squares lose their digits
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
    """What `whole` becomes where one of its parts is cut."""
    one, first, second = _part(sums, begin, end), _part(sums, begin, at), _part(sums, at, end)
    each = zip(whole, one, first, second, strict=True)
    return _Squares(*(all_ - before + left + right for all_, before, left, right in each))
