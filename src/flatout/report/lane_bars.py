"""A step's time as one line in a terminal: each lane with its bar and its milliseconds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from flatout.measure import STEP_LANES
from flatout.observe import Observation
from flatout.words import rounded

STEP = (*STEP_LANES, "gc", "idle")
BETWEEN = ("evaluation", "saving")

_SHOWN = (0.01, 0.02, 0.03, 0.05, 0.08, 0.12)
"""Shares of a step from which a lane has its own bar: the first that makes the line fit is used."""
_SHORT = {"forward": "fwd", "backward": "bwd", "optimizer": "opt", "evaluation": "eval"}
"""Short names of lanes, for a line without room for full names and bars."""
_OTHER = 0.005
"""Share of a step from which the lanes without a bar are shown as "other"."""
_BAR, _LEAST_BAR = 24, 10
"""_BAR: columns of all bars together. _LEAST_BAR: minimum number of columns to distinguish bars."""
_PARTS = " ▏▎▍▌▋▊▉"
"""Blocks that fill eighths of a column."""


@dataclass(frozen=True)
class Lanes:
    """A step's time as bars: `step 412 ms  input ████████ 251 | forward ██ 58 | other 4`.

    Attributes:
        lanes: milliseconds per step by lane.
        name: first words of the line.
    """

    lanes: Mapping[str, float]
    name: str = ""

    def line(self, width: int, *, is_ascii: bool = False) -> Text:
        step = sum(ms for name, ms in self.lanes.items() if name not in BETWEEN)
        begin = f"{self.name}step {rounded(step, 2)} ms  "
        for least in _SHOWN:
            lanes = {name: ms for name, ms in self.lanes.items() if ms and ms >= least * step}
            for names in ({}, _SHORT):
                words = _parts(self.lanes, lanes, names, step)
                # The bars take the rest of the line.
                room = width - len(begin) - len(" | ".join(words).replace("{}", ""))
                if min(room, _BAR) >= _LEAST_BAR:
                    break
            else:
                continue
            break
        columns = max(len(lanes), min(_BAR, room))
        longest = sum(lanes.values())
        bars = [
            _bar(ms / longest * (columns - len(lanes)), is_ascii=is_ascii) for ms in lanes.values()
        ]
        return Text(begin + " | ".join(words).format(*bars))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if sum(self.lanes.values()):
            yield self.line(options.max_width, is_ascii=options.ascii_only)
        else:
            yield Text("no step was recorded")


def rank_bars(rank: Observation, of_several: bool, width: int) -> Iterator[Text]:
    if rank.steps and any(rank.lanes_ms.values()):
        known = {name: rank.lanes_ms.get(name) or 0.0 for name in (*STEP, *BETWEEN)}
        yield Lanes(known, f"rank {rank.rank} " if of_several else "").line(width)


def _parts(
    known: Mapping[str, float], lanes: Mapping[str, float], names: Mapping[str, str], step: float
) -> list[str]:
    other = sum(value for name, value in known.items() if name not in lanes)
    words = [f"{names.get(name, name)} {{}} {rounded(ms, 2)}" for name, ms in lanes.items()]
    return words + ([f"other {rounded(other, 2)}"] if other >= _OTHER * step else [])


def _bar(columns: float, *, is_ascii: bool) -> str:
    if is_ascii:
        return "#" * max(1, round(columns))
    eighths = max(1, round(8 * columns))
    part = _PARTS[eighths % 8].strip()
    return "█" * (eighths // 8) + part
