"""Picture of a fit's step times against the limit of its machine."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from flatout.errors import FlatoutError
from flatout.measure import KINDS
from flatout.plotting import figure_class
from flatout.train.explanation import Explanation

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def draw(explanation: Explanation, path: str | os.PathLike[str]) -> Figure:
    """Draw the lanes with their limits, and predicted times by settings, into an image file."""
    if explanation.doubt:
        raise FlatoutError(
            f"no roofline is drawn: {explanation.doubt}",
            do="fit and explain again while no other job uses the machine",
        )
    if not explanation.lanes:
        raise FlatoutError(
            "there is no roofline of this fit to draw",
            do="explain it on the machine that it ran on; a compiled model has none",
        )
    figure_of = figure_class()
    figure = figure_of(figsize=(12, 4.2), layout="constrained")
    lanes, promised = figure.subplots(1, 2, width_ratios=(3, 2))
    _draw_lanes(explanation, lanes)
    _draw_promised(explanation, promised)
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise FlatoutError(f"cannot draw: {error}", where=str(path)) from error
    return figure


def _draw_lanes(explanation: Explanation, axes: Axes) -> None:
    lanes = explanation.lanes
    places = range(len(lanes))
    axes.barh(places, [1e3 * lane.took_s for lane in lanes], 0.8, color="0.85", label="took")
    left = [0.0] * len(lanes)
    kinds = [
        k for k in KINDS if any(lane.kinds.get(k, 0.0) > 0.01 * lane.least_s for lane in lanes)
    ]
    for kind in kinds:
        widths = [1e3 * lane.kinds.get(kind, 0.0) for lane in lanes]
        color = f"C{KINDS.index(kind) % 10}" if kind != "dispatch" else "0.3"
        axes.barh(places, widths, 0.4, left=left, color=color, label=kind.replace("_", " "))
        left = [low + width for low, width in zip(left, widths, strict=True)]
    for place, lane in zip(places, lanes, strict=True):
        at = max(1e3 * lane.took_s, left[place])
        axes.annotate(f" {lane.share:.0%}", (at, place), va="center")
    axes.set(title="measured time of a step and this machine's limit", xlabel="ms")
    axes.set_yticks(places, [lane.name for lane in lanes])
    axes.margins(x=0.15)
    axes.invert_yaxis()
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)


def _draw_promised(explanation: Explanation, axes: Axes) -> None:
    names = [words.replace(" · ", "\n") for words, _, _ in explanation.possible_savings]
    bars = axes.barh(
        names, [1e3 * seconds for _, seconds, _ in explanation.possible_savings], color="C0"
    )
    axes.bar_label(bars, [f"{gain:.2f}x" for _, _, gain in explanation.possible_savings], padding=3)
    axes.set(title="minimum time of a step, by settings", xlabel="ms")
    axes.margins(x=0.2)
    axes.invert_yaxis()
