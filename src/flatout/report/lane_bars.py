"""A step's time as one line of a terminal: each lane with its bar and its ms."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rich.text import Text

from flatout.measure import STEP_LANES
from flatout.observe import Observation
from flatout.words import rounded

STEP = (*STEP_LANES, "gc", "idle")
BETWEEN = ("evaluation", "saving")

_SHOWN = (0.01, 0.02, 0.03, 0.05, 0.08, 0.12)
"""Shares of a step from which on a lane has its own bar: the first with which a line has room."""
_SHORT = {"forward": "fwd", "backward": "bwd", "optimizer": "opt", "evaluation": "eval"}
"""Of lanes, where a line has no room for their names and bars."""
_TOLD = 0.005
"""Share from which on what is too small for a bar is told."""
_BAR, _LEAST_BAR = 24, 10
"""Columns of all bars together, and the fewest in which they can be told apart."""
_PARTS = " ▏▎▍▌▋▊▉"
"""Eighths of a column."""


def lane_bars(rank: Observation, of_several: bool, width: int) -> Iterator[Text]:
    """One line that fits the width: each lane with its bar; what is too small, together."""
    if not rank.steps or not any(rank.lanes_ms.values()):
        return
    known = {name: rank.lanes_ms.get(name) or 0.0 for name in (*STEP, *BETWEEN)}
    step = sum(known[name] for name in STEP)
    begin = (f"rank {rank.rank} " if of_several else "") + f"step {rounded(step, 2)} ms  "
    for least in _SHOWN:
        lanes = {name: value for name, value in known.items() if value >= least * step}
        for names in ({}, _SHORT):
            words = _words(known, lanes, names, step)
            # The bars take what the words leave of the line.
            room = width - len(begin) - len(" | ".join(words).replace("{}", ""))
            if min(room, _BAR) >= _LEAST_BAR:
                break
        else:
            continue
        break
    columns = max(len(lanes), min(_BAR, room))
    longest = sum(lanes.values())
    bars = [_bar(value / longest * (columns - len(lanes))) for value in lanes.values()]
    yield Text(begin + " | ".join(words).format(*bars))


def _words(
    known: Mapping[str, float], lanes: Mapping[str, float], names: Mapping[str, str], step: float
) -> list[str]:
    other = sum(value for name, value in known.items() if name not in lanes)
    words = [f"{names.get(name, name)} {{}} {rounded(ms, 2)}" for name, ms in lanes.items()]
    return words + ([f"other {rounded(other, 2)}"] if other >= _TOLD * step else [])


def _bar(columns: float) -> str:
    eighths = max(1, round(8 * columns))
    part = _PARTS[eighths % 8].strip()
    return "█" * (eighths // 8) + part
