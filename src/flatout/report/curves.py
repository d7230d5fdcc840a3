"""Lines over time or samples as plain geometry, for pages.

Places along the horizontal are in percent of the picture, those along the vertical in its pixels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from flatout.words import count_words, duration, rounded

HEIGHT = 150
"""Pixels of a chart's lines, without its labels."""

# More points than a screen has columns only make the file larger.
_MOST_POINTS = 400
_TICKS = 4
# From this ratio of the largest to the smallest value on, a scale by powers shows more.
_LOG_FROM = 100.0

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Line:
    """A line to draw.

    Attributes:
        name: of what it shows.
        points: (x, y), in order of x.
        run: the number of its run, which decides its color.
        is_dashed: to tell a second figure of the same run.
        is_stepped: whether a value holds since the point before.
    """

    name: str
    points: Points
    run: int = 0
    is_dashed: bool = False
    is_stepped: bool = False


@dataclass(frozen=True)
class Chart:
    """Lines on one scale.

    Attributes:
        title: what is drawn, in which unit.
        lines: (name, color, whether dashed, "x,y x,y ..." with x up to 1000 and y up to HEIGHT).
        x_ticks: (percent, words).
        y_ticks: (pixels from the top, words).
        words: what it shows, for those who hear the page.
        height: of the lines, in pixels.
        shows_names: whether its lines are told apart by its own legend.
    """

    title: str
    lines: list[tuple[str, str, bool, str]]
    x_ticks: list[tuple[float, str]]
    y_ticks: list[tuple[float, str]]
    words: str
    height: int = HEIGHT
    shows_names: bool = True


_COLORS = "abcdef"


def color_of(run: int) -> str:
    """The class of a run's color; after six they come again."""
    return _COLORS[run % len(_COLORS)]


def chart(
    title: str,
    lines: Sequence[Line],
    *,
    x_is: str,
    from_zero: bool = False,
    unit: str = "",
    shows_names: bool = True,
) -> Chart | None:
    """Return where lines and ticks stand; None without two points in a row."""
    lines = [_finite(line) for line in lines]
    lines = [line for line in lines if len(line.points) > 1]
    if not lines:
        return None
    ys = [y for line in lines for _, y in line.points]
    right = max(x for line in lines for x, _ in line.points) or 1.0
    low, high = (min(0.0, *ys) if from_zero else min(ys)), max(ys)
    is_log = not from_zero and low > 0 and high / low > _LOG_FROM
    if not is_log:
        low, high = _rounded_out(low, high)
    bottom, top = (math.log(low), math.log(high)) if is_log else (low, high)

    def at(y: float) -> float:
        value = math.log(y) if is_log else y
        return float(HEIGHT * (1 - (value - bottom) / ((top - bottom) or 1.0)))

    drawn = []
    for line in lines:
        points = _thinned(_stepped(line.points) if line.is_stepped else line.points)
        words = " ".join(f"{1000 * x / right:.1f},{at(y):.1f}" for x, y in points)
        drawn.append((line.name, color_of(line.run), line.is_dashed, words))
    levels = _powers(low, high) if is_log else _even(low, high)
    in_words = count_words if x_is == "samples" else duration
    return Chart(
        title=title + (", by powers" if is_log else ""),
        lines=drawn,
        x_ticks=[(100 * n / _TICKS, in_words(right * n / _TICKS)) for n in range(_TICKS + 1)],
        y_ticks=[(at(y), f"{rounded(y)}{unit}") for y in levels],
        words=f"{title}: " + ", ".join(_in_words(line, unit) for line in lines),
        # A line alone may be of another figure than the title names.
        shows_names=shows_names and (len(drawn) > 1 or not title.startswith(f"{drawn[0][0]} ")),
    )


def _finite(line: Line) -> Line:
    points = [(x, y) for x, y in line.points if math.isfinite(x) and math.isfinite(y)]
    return Line(line.name, points, line.run, line.is_dashed, line.is_stepped)


def _stepped(points: Points) -> Points:
    result, before = [], 0.0
    for x, y in points:
        result += [(before, y), (x, y)]
        before = x
    return result


def _thinned(points: Points) -> Points:
    if len(points) <= _MOST_POINTS:
        return points
    result: list[tuple[float, float]] = [points[0]]
    size = math.ceil(2 * len(points) / _MOST_POINTS)
    for begin in range(1, len(points) - 1, size):
        stretch = points[begin : begin + size]
        ends = {min(stretch, key=lambda p: p[1]), max(stretch, key=lambda p: p[1])}
        result += sorted(ends)
    return [*result, points[-1]]


def _rounded_out(low: float, high: float) -> tuple[float, float]:
    if high <= low:
        spread = abs(low) * 0.1 or 1.0
        low, high = low - spread, high + spread
    step = _step(low, high)
    return math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step


def _step(low: float, high: float) -> float:
    rough = (high - low) / _TICKS
    power = 10 ** math.floor(math.log10(rough))
    return float(
        next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * 0.999)
    )


def _even(low: float, high: float) -> list[float]:
    step = _step(low, high)
    return [low + step * n for n in range(round((high - low) / step) + 1)]


def _powers(low: float, high: float) -> list[float]:
    first, last = math.ceil(math.log10(low)), math.floor(math.log10(high))
    every = max(1, math.ceil((last - first + 1) / (_TICKS + 1)))
    return [10.0**n for n in range(first, last + 1, every)]


def _in_words(line: Line, unit: str) -> str:
    first, last = line.points[0][1], line.points[-1][1]
    return f"{line.name} from {rounded(first)}{unit} to {rounded(last)}{unit}"
