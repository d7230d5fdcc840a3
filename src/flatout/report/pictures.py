"""The page's pictures as plain geometry: positions of each bar, dot and tick.

Horizontal positions are in percent of the picture's width, which the browser knows and Python does
not. So pictures stretch with the page while their text keeps its size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean

from flatout.measure import LANES
from flatout.words import count_words, duration, rounded

MOST_RANKS = 16
"""Maximum number of ranks that are drawn; of more ranks, only the slowest are drawn."""

HEIGHT = 150
"""Pixels of a chart's lines, without its labels."""

_CHARACTER_PX, _WIDE_PX = 6.8, 560
# Maximum number of points of a line: more points than columns of a screen only enlarge the file.
_MOST_POINTS = 400
_TICKS = 4
_COLORS = "abcdef"

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Segment:
    lane: str
    ms: float
    share: float
    left: float
    width: float
    label: str


@dataclass(frozen=True)
class Bar:
    rank: int
    ms: float
    segments: list[Segment]

    @property
    def words(self) -> str:
        parts = ", ".join(f"{segment.lane} {rounded(segment.ms)}" for segment in self.segments)
        return f"rank {self.rank}: {rounded(self.ms)} ms per step: {parts}"


def lane_bars(lanes_of_ranks: Mapping[int, Mapping[str, float | None]]) -> list[Bar]:
    known = {rank: _known(lanes) for rank, lanes in lanes_of_ranks.items()}
    totals = {rank: sum(lanes.values()) for rank, lanes in known.items() if lanes}
    slowest = sorted(totals, key=lambda rank: (-totals[rank], rank))[:MOST_RANKS]
    if not slowest:
        return []
    longest = totals[slowest[0]]
    return [Bar(rank, totals[rank], _segments(known[rank], longest)) for rank in sorted(slowest)]


def _known(lanes: Mapping[str, float | None]) -> dict[str, float]:
    names = dict.fromkeys([*LANES, *lanes])
    result = {name: lanes.get(name) for name in names}
    return {name: ms for name, ms in result.items() if ms is not None and 0 < ms < math.inf}


def _segments(lanes: Mapping[str, float], longest: float) -> list[Segment]:
    left, segments, total = 0.0, [], sum(lanes.values())
    for lane, ms in lanes.items():
        width = 100 * ms / longest
        label = _label(lane, ms, width / 100 * _WIDE_PX)
        segments.append(Segment(lane, ms, ms / total, left, width, label))
        left += width
    return segments


def _label(lane: str, ms: float, room_px: float) -> str:
    for label in (f"{lane} {rounded(ms)}", rounded(ms)):
        if _CHARACTER_PX * len(label) + 8 <= room_px:
            return label
    return ""


@dataclass(frozen=True)
class LaneRow:
    """One lane over all ranks: mean, share of the mean step, and the rank with the longest time."""

    lane: str
    ms: float
    share: float
    most_ms: float
    most_rank: int


def lane_rows(lanes_of_ranks: Mapping[int, Mapping[str, float | None]]) -> list[LaneRow]:
    known = {rank: lanes for rank in lanes_of_ranks if (lanes := _known(lanes_of_ranks[rank]))}
    if not known:
        return []
    whole = mean(sum(lanes.values()) for lanes in known.values())
    rows = []
    for lane in dict.fromkeys(lane for lanes in known.values() for lane in lanes):
        by_rank = {rank: lanes.get(lane, 0.0) for rank, lanes in known.items()}
        most = max(by_rank, key=lambda rank: by_rank[rank])
        ms = mean(by_rank.values())
        rows.append(LaneRow(lane, ms, ms / whole, by_rank[most], most))
    return sorted(rows, key=lambda row: -row.ms)


@dataclass(frozen=True)
class Line:
    """A line to draw."""

    name: str
    points: Points
    run: int = 0
    is_dashed: bool = False
    is_stepped: bool = False


@dataclass(frozen=True)
class Chart:
    """Lines on one scale.

    Attributes:
        title: the drawn figure, and its unit.
        lines: (name, color, whether dashed, "x,y x,y ..." with x up to 1000 and y up to HEIGHT).
        x_ticks: ticks of the x axis, as (percent of the width, label).
        y_ticks: ticks of the y axis, as (pixels from the top, label).
        words: description for screen readers.
        shows_names: True if the chart has its own legend.
    """

    title: str
    lines: list[tuple[str, str, bool, str]]
    x_ticks: list[tuple[float, str]]
    y_ticks: list[tuple[float, str]]
    words: str
    shows_names: bool = True


def color_of(run: int) -> str:
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
    lines = [_finite(line) for line in lines]
    lines = [line for line in lines if len(line.points) > 1]
    if not lines:
        return None
    ys = [y for line in lines for _, y in line.points]
    right = max(x for line in lines for x, _ in line.points) or 1.0
    low, high = (min(0.0, *ys) if from_zero else min(ys)), max(ys)
    low, high = _rounded_out(low, high)

    def at(y: float) -> float:
        return HEIGHT * (1 - (y - low) / (high - low))

    drawn = []
    for line in lines:
        points = _thinned(_stepped(line.points) if line.is_stepped else line.points)
        words = " ".join(f"{1000 * x / right:.1f},{at(y):.1f}" for x, y in points)
        drawn.append((line.name, color_of(line.run), line.is_dashed, words))
    step = _step(low, high)
    levels = [low + step * n for n in range(round((high - low) / step) + 1)]
    in_words = count_words if x_is == "samples" else duration
    return Chart(
        title=title,
        lines=drawn,
        x_ticks=[(100 * n / _TICKS, in_words(right * n / _TICKS)) for n in range(_TICKS + 1)],
        y_ticks=[(at(y), f"{rounded(y)}{unit}") for y in levels],
        words=f"{title}: " + ", ".join(_in_words(line, unit) for line in lines),
        # A single line may show another figure than the title names.
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


def _in_words(line: Line, unit: str) -> str:
    first, last = line.points[0][1], line.points[-1][1]
    return f"{line.name} from {rounded(first)}{unit} to {rounded(last)}{unit}"
