"""A forecast in a terminal of 80 columns, and as plain data."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from textwrap import wrap
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from flatout.forecast.decisions import Decision, decisions
from flatout.forecast.forecast import WIDENED, Forecast, Point, Side, Spreading
from flatout.forecast.network import Network
from flatout.forecast.profiled import TCP
from flatout.words import count_words, counted, rounded

_WIDTH = 80
# Kinds of recommendations about the number of hosts, in order of decreasing importance.
_MARKS = ("deadline", "budget", "hosts")


class Shown:
    """A forecast as text for a terminal."""

    def __init__(self, forecast: Forecast) -> None:
        self._forecast = forecast

    @cached_property
    def decisions(self) -> list[Decision]:
        """Recommendations that follow from the forecast."""
        return decisions(self._forecast)

    def as_dict(self) -> dict[str, Any]:
        """Return plain data: samples per second, seconds, and ends of 90% intervals."""
        asked = self._forecast.asked
        return {
            "sides": [
                {
                    "runs": [profile.run for profile in side.measured.profiles],
                    "device": side.measured.device,
                    "price": None if side.price is None else list(side.price),
                    "epochs": side.epochs,
                    "hosts": [point.as_dict() for point in side.points],
                    "notes": side.notes,
                }
                for side in self._forecast.sides
            ],
            "currency": None if asked.prices is None else asked.prices.currency,
            "decisions": [decision.as_dict() for decision in self.decisions],
            "widened_by": WIDENED,
        }

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for side in self._forecast.sides:
            for line in wrap(" · ".join(_basis(side)), _WIDTH):
                yield Text(line)
            yield self._table(side)
        for decision in self.decisions:
            for line in wrap(f"{decision.about}: {decision.words}", _WIDTH, subsequent_indent="  "):
                yield Text(line)
        for line in wrap(_footnote(self._forecast), _WIDTH):
            yield Text(line)

    def _table(self, side: Side) -> Table:
        table = Table(box=None, pad_edge=False, header_style="bold")
        has_time = any(point.seconds is not None for point in side.points)
        has_cost = any(point.cost is not None for point in side.points)
        table.add_column("hosts", justify="right", no_wrap=True)
        table.add_column("samples/s", no_wrap=True)
        table.add_column("efficiency", no_wrap=True)
        if has_time:
            table.add_column("hours", no_wrap=True)
        if has_cost:
            prices = self._forecast.asked.prices
            table.add_column("" if prices is None else prices.currency, no_wrap=True)
        table.add_column("")
        for point in side.points:
            cells = [str(point.hosts), _rate(point), _efficiency(point)]
            if has_time:
                cells.append(_number(point.seconds, point.is_range, 1 / 3600))
            if has_cost:
                cells.append(_number(point.cost, point.is_range))
            table.add_row(*map(Text, [*cells, self._mark(side, point)]))
        return table

    def _mark(self, side: Side, point: Point) -> str:
        if point.is_range:
            return f"{rounded(point.growth)}x measured"
        chosen = [
            decision.about
            for decision in self.decisions
            if decision.about in _MARKS and decision.choice == point.hosts
        ]
        if not chosen or len(self._forecast.sides) > 1:
            return ""
        return f"<- {min(chosen, key=_MARKS.index)}"


def _footnote(forecast: Forecast) -> str:
    lines = ["intervals are of 90%"]
    if any(point.is_range for side in forecast.sides for point in side.points):
        lines.append("too far from what was measured there is a range and no number")
    epochs = {side.epochs for side in forecast.sides} - {None}
    if epochs:
        words = counted(max(epoch for epoch in epochs if epoch is not None), "epoch")
        lines.append(f"hours are of {words}: how many an accuracy takes depends on the batch")
    return "; ".join(lines)


def _basis(side: Side) -> Iterator[str]:
    measured, asked = side.measured, side.asked
    sizes = sorted(
        {(row.shape.hosts, row.shape.ranks) for row in measured.rows if not row.shape.silent}
    )
    ranks = " and ".join(str(count) for _, count in sizes)
    most = max(hosts for hosts, _ in sizes)
    yield f"measured: {ranks} rank{'' if ranks == '1' else 's'} of {counted(most, 'host')}"
    if max(asked.hosts) > 1:
        if isinstance(asked.network, Network):
            yield f"network measured between {counted(len(asked.network.hosts), 'host')}"
        else:
            yield f"network given, not measured: TCP at {TCP[0]} to {TCP[1]} of line rate"
        if asked.rtt is None and not isinstance(asked.network, Network):
            yield "round trip not given: 0.05 to 0.5 ms"
    if asked.keeps_rank_batch:
        yield f"each rank keeps its batch of {measured.job.batch:,.0f}: that changes learning"
    else:
        yield f"a step has {measured.batch:,.0f} samples at every size"
    yield from side.notes


def _rate(point: Point) -> str:
    rate = point.rate
    if point.is_range:
        return f"{count_words(rate.low)}..{count_words(rate.high)}"
    return f"{count_words(rate.middle)} [{count_words(rate.low)},{count_words(rate.high)}]"


def _efficiency(point: Point) -> str:
    efficiency = point.efficiency
    if point.is_range:
        return f"{100 * efficiency.low:.0f}..{efficiency.high:.0%}"
    return f"{efficiency.middle:.0%}"


def _number(spreading: Spreading | None, is_range: bool, unit: float = 1.0) -> str:
    if spreading is None:
        return ""
    if is_range:
        return f"{_short(spreading.low * unit)}..{_short(spreading.high * unit)}"
    return _short(spreading.middle * unit)


def _short(value: float) -> str:
    return count_words(value) if value >= 1000 else rounded(value, 2)
