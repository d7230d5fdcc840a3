"""Check for kept graphs of past steps, with which memory grows in each step."""

from __future__ import annotations

from itertools import pairwise
from statistics import fmean, linear_regression, median

from flatout.doctor.checks.check import Findings, NoSignal, check
from flatout.doctor.checks.signals import ms
from flatout.doctor.edits import tensors
from flatout.doctor.finding import Finding
from flatout.measure import grows_steadily
from flatout.observe import KeptGraphs, Observation
from flatout.words import rounded

_POINTS = 8
"""Minimum number of memory measurements to fit a line."""

_WARM = 0.25
"""Share of measurements that is skipped at the start, while caches, workers and allocators fill."""

_STRAIGHT = 0.9
"""Smallest share of the variation that a straight line has to explain (R squared)."""

_LEAST_MB = 8.0
"""Minimum growth of memory in megabytes that is not the allocator's own."""

_STAIRS_MB, _EVEN = 16.0, 8
"""Largest normal jump of memory while a heap grows, in MB.

_STAIRS_MB: largest normal jump; a larger jump has another cause, such as unfrozen layers. If the
whole growth is less than three such jumps, a jump may be at most the growth divided by _EVEN.
"""

_BINS = 24
"""Number of bins for the durations of steps."""

_NODES = 0.5
"""Minimum growth of the graphs in nodes per step: even a small graph has several nodes."""

_COUNTED = 50_000
"""Maximum number of nodes that are counted."""

_DO = "add up numbers, not tensors with a graph: total += loss.detach()"
"""Advice for a sum of losses."""


@check(edit=tensors.detach)
def look(observation: Observation) -> Findings:
    """Report variables that hold more graphs in each step, or memory that rises linearly."""
    kept = observation.kept_graphs
    grows = _grown(observation)
    words, slower = grows if isinstance(grows, tuple) else ("", None)
    for item in kept:
        yield _of_name(item, words, slower)
    if kept:
        return
    if not words:
        if grows:
            raise NoSignal(str(grows))
        return
    after, nodes = observation.graph_nodes[-1]
    yield Finding(
        kind="slow",
        what=f"{words}: something keeps the graphs of past steps, {nodes:,} nodes after {after} "
        "steps",
        do=f"{_DO}; look for lists of losses or outputs, and for retain_graph=True",
        where=_where(observation),
        cost_ms=slower,
        is_estimate=True,  # steps become longer and longer
        parity="bit-identical",
    )


def _of_name(kept: KeptGraphs, grows: str, slower: float | None) -> Finding:
    more = f"{kept.nodes / max(1, kept.steps):,.0f} more with each"
    what = (
        f"{kept.name} keeps {kept.steps} tensors with their graphs"
        if kept.is_list
        else f"{kept.name} is a sum that keeps the graphs of {kept.steps} steps"
    )
    return Finding(
        kind="slow",
        what=f"{what}: {kept.nodes:,} nodes, {more}" + (f"; {grows}" if grows else ""),
        do="keep numbers: append(loss.item()), or loss.detach()" if kept.is_list else _DO,
        where="" if kept.site is None else str(kept.site),
        cost_ms=slower,
        is_estimate=True,  # steps become longer and longer
        parity="bit-identical",
    )


def _grown(observation: Observation) -> tuple[str, float | None] | str:
    first = int(_WARM * len(observation.memory_mb))
    steps, memory = observation.memory_at[first:], observation.memory_mb[first:]
    if len(memory) < _POINTS or len(set(steps)) < _POINTS:
        return f"memory was measured {len(memory)} times, which is too few to see it grow"
    slope, start = linear_regression(steps, memory)
    grown = slope * (steps[-1] - steps[0])
    if grown < _LEAST_MB or _r_squared(steps, memory, slope, start) < _STRAIGHT:
        return ""
    stairs = _STAIRS_MB if grown >= 3 * _STAIRS_MB else grown / _EVEN
    if not grows_steadily(steps, memory, stairs**2 / 12):
        return ""  # memory jumped in a few steps only
    if len(observation.graph_nodes) < 2:
        return "memory grows, but the objects that hold it were not checked"
    if not _nodes_grow(observation.graph_nodes):
        return ""  # memory grows for another reason
    slower = _slower(observation.step_ms)
    longer = f", and steps take {ms(slower)} longer at the end" if slower else ""
    words = (
        f"memory grows by {rounded(slope, 2)} MB with each step, {grown:,.0f} MB in "
        f"{steps[-1] - steps[0]} steps{longer}"
    )
    return words, slower


def _r_squared(steps: list[int], memory: list[float], slope: float, start: float) -> float:
    mean = fmean(memory)
    around = sum((value - mean) ** 2 for value in memory)
    left = sum((y - start - slope * x) ** 2 for x, y in zip(steps, memory, strict=True))
    return 1 - left / around if around else 0.0


def _nodes_grow(looks: list[tuple[int, int]]) -> bool:
    return all(
        after[1] - before[1] >= _NODES * (after[0] - before[0])
        for before, after in pairwise(looks)
        if after[1] < _COUNTED
    )


def _slower(steps: list[float]) -> float | None:
    quarter = len(steps) // 4
    if not quarter:
        return None
    growth = median(steps[-quarter:]) - median(steps[:quarter])
    width = max(1, len(steps) // _BINS)
    bins = [median(steps[at : at + width]) for at in range(0, len(steps) - width + 1, width)]
    is_growth = growth > 0.1 * median(steps) and grows_steadily(range(len(bins)), bins, 0.0)
    return growth if is_growth else None


def _where(observation: Observation) -> str:
    if observation.graph_site is not None:
        return str(observation.graph_site)
    retained = [
        c for c in observation.calls if c.kind == "backward" and c.detail.get("retain_graph")
    ]
    return str(retained[0].site) if retained else ""
