"""The page's pictures as plain geometry: where each bar, dot and tick stands.

All places along the horizontal are in percent of the picture's width, which the browser knows and
Python does not; so pictures stretch with the page while their text keeps its size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, median

from flatout.measure import LANES
from flatout.words import rounded

MOST_RANKS = 16
"""More ranks than these would be a wall of bars: the slowest are drawn."""

_CHARACTER_PX = 6.8
_PHONE_PX = 310
_WIDE_PX = 560
_RATIOS = (0.1, 0.2, 0.25, 0.33, 0.5, 0.67, 0.8, 0.9, 0.95, 1, 1.05, 1.1, 1.25, 1.5, 2, 3, 4, 6, 10)
_FEWEST_PERCENT_BETWEEN_TICKS = 13


@dataclass(frozen=True)
class Segment:
    """One lane of one rank.

    Attributes:
        lane: its name.
        ms: per step.
        share: of the rank's step, from 0 to 1.
        left, width: percent of the picture.
        label: what fits into it on a wide page: name and time, the time alone, or nothing.
        phone_label: what fits into it on a phone.
    """

    lane: str
    ms: float
    share: float
    left: float
    width: float
    label: str
    phone_label: str


@dataclass(frozen=True)
class Bar:
    """One rank's step: `ms` is the sum of its segments."""

    rank: int
    ms: float
    segments: list[Segment]

    @property
    def words(self) -> str:
        """What the bar shows, for those who hear the page."""
        parts = ", ".join(f"{segment.lane} {rounded(segment.ms)}" for segment in self.segments)
        return f"rank {self.rank}: {rounded(self.ms)} ms per step: {parts}"


def lane_bars(lanes_of_ranks: Mapping[int, Mapping[str, float | None]]) -> list[Bar]:
    """Bars of the ranks, by rank, on one scale."""
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
        wide, phone = (_label(lane, ms, width / 100 * px) for px in (_WIDE_PX, _PHONE_PX))
        segments.append(Segment(lane, ms, ms / total, left, width, wide, phone))
        left += width
    return segments


def _label(lane: str, ms: float, room_px: float) -> str:
    for label in (f"{lane} {rounded(ms)}", rounded(ms)):
        if _CHARACTER_PX * len(label) + 8 <= room_px:
            return label
    return ""


@dataclass(frozen=True)
class Histogram:
    """Step times of one rank.

    Attributes:
        bars: (left, width, height, count): percent of the picture, and how many steps.
        low, high: milliseconds at its left and right edge.
        middle: where the median stands, in percent.
        median, p95, longest: in milliseconds.
        count: how many steps.
        beyond: how many of them are longer than `high`, and so out of the picture.
    """

    bars: list[tuple[float, float, float, int]]
    low: float
    high: float
    middle: float
    median: float
    p95: float
    longest: float
    count: int
    beyond: int


def histogram(step_ms: Sequence[float]) -> Histogram | None:
    """How long steps took; None with fewer than five.

    The few longest, such as a first step that compiles, are counted beside the picture: they would
    press all others into one bar.
    """
    times = sorted(ms for ms in step_ms if 0 < ms < math.inf)
    if len(times) < 5:
        return None
    middle, p95 = median(times), times[math.ceil(0.95 * len(times)) - 1]
    low, high = times[0], min(times[-1], max(1.25 * p95 - 0.25 * times[0], 1.05 * middle))
    if high <= low:
        low, high = 0.95 * middle, 1.05 * middle
    bins = min(40, max(8, math.ceil(2 * len(times) ** 0.5)))
    counts = [0] * bins
    for ms in times:
        if ms <= high:
            counts[min(bins - 1, int((ms - low) / (high - low) * bins))] += 1
    width = 100 / bins
    bars = [(i * width, width, 100 * n / max(counts), n) for i, n in enumerate(counts) if n]
    return Histogram(
        bars=bars,
        low=low,
        high=high,
        middle=100 * (middle - low) / (high - low),
        median=middle,
        p95=p95,
        longest=times[-1],
        count=len(times),
        beyond=sum(ms > high for ms in times),
    )


@dataclass(frozen=True)
class Forest:
    """Ratios with their intervals on one logarithmic scale.

    Attributes:
        rows: (low, mid, high) of each trial, in percent; None where nothing was measured.
        bands: (left, width) of each trial's noise floor, in percent; None where it is unknown.
        one: where a ratio of 1 stands, in percent.
        ticks: (place in percent, ratio).
    """

    rows: list[tuple[float, float, float] | None]
    bands: list[tuple[float, float] | None]
    one: float
    ticks: list[tuple[float, float]]


def forest(
    ratios: Sequence[tuple[float, float, float] | None], floors: Sequence[float | None]
) -> Forest | None:
    """Where intervals and floors stand; None without a ratio."""
    known = [ratio for ratio in ratios if ratio is not None]
    if not known:
        return None
    widest = max((floor for floor in floors if floor is not None), default=0.0)
    left = math.log(min(0.95, _below(widest), *(low for low, _, _ in known)))
    right = math.log(max(1.05, 1 + widest, *(high for _, _, high in known)))
    margin = 0.04 * (right - left)

    def at(ratio: float) -> float:
        return 100 * (math.log(ratio) - left + margin) / (right - left + 2 * margin)

    bands = [
        None if floor is None else (at(_below(floor)), at(1 + floor) - at(_below(floor)))
        for floor in floors
    ]
    rows = [
        None if ratio is None else (at(ratio[0]), at(ratio[1]), at(ratio[2])) for ratio in ratios
    ]
    # A tick at 1 first; the others where there is room between those that stand already.
    ticks = [(at(1), 1.0)]
    for ratio in sorted(_RATIOS, key=lambda ratio: -abs(math.log(ratio))):
        place = at(ratio)
        near = min(abs(place - other) for other, _ in ticks)
        if 2 <= place <= 98 and near >= _FEWEST_PERCENT_BETWEEN_TICKS:
            ticks.append((place, ratio))
    return Forest(rows, bands, at(1), sorted(ticks))


def _below(floor: float) -> float:
    # The lower edge of the noise, as in measure.trial; a floor of 100% has none.
    return max(0.1, 1 - floor)


@dataclass(frozen=True)
class LaneRow:
    """One lane over all ranks: the mean, its share of the mean step, and the rank with most."""

    lane: str
    ms: float
    share: float
    most_ms: float
    most_rank: int


def lane_rows(lanes_of_ranks: Mapping[int, Mapping[str, float | None]]) -> list[LaneRow]:
    """The lanes that took time, largest first."""
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
