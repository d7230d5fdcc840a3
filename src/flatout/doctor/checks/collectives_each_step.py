"""Check for needless waits between ranks: many small collectives per step, or one just to log."""

from __future__ import annotations

from collections.abc import Sequence

from flatout.doctor.checks.check import COMPILES, Findings, NoSignal, rank_check
from flatout.doctor.checks.signals import calls, cost_ms, has_peers, is_each_step, kind_of, ms
from flatout.doctor.finding import Finding
from flatout.observe import Call, Observation

_SEVERAL = 1.5
"""Number of calls of a line per step from which on the calls could be merged into one call."""

_BUCKET = 1 << 20
"""Maximum bytes for which the call itself costs more than the transfer: torch's first bucket."""

_FEW = 1 << 16
"""Maximum bytes of a value that is reduced to be logged; gradients are larger."""


@rank_check()
def look(observations: Sequence[Observation]) -> Findings:
    """Report lines with small collectives in most steps.

    For each line, the shortest wait of any rank counts, since the other ranks wait for that rank.
    """
    if not has_peers(observations):
        return
    by_line: dict[tuple[str, str], list[tuple[float, Observation, Call]]] = {}
    for observation in observations:
        for call in calls(observation, "collective"):
            if is_each_step(observation, call):
                key = str(call.site), call.detail["name"]
                by_line.setdefault(key, []).append(
                    (cost_ms(observation, call) or 0.0, observation, call)
                )
    if not by_line and any(observation.compiles for observation in observations):
        raise NoSignal(COMPILES)
    for (_, name), ranks in by_line.items():
        cost, observation, call = min(ranks, key=lambda one: one[0])
        if call.count >= _SEVERAL * observation.steps and _bytes(call) <= _BUCKET:
            yield _several(observation, call, name, cost)
        elif _bytes(call) <= min(_FEW, _least_gradients(observation)):
            yield _single(observation, call, name, cost)


def _bytes(call: Call) -> int:
    return int(call.detail.get("bytes", 0))


def _least_gradients(observation: Observation) -> float:
    return min((item.elements for item in observation.optimizers if item.elements), default=_FEW)


def _several(observation: Observation, call: Call, name: str, cost: float) -> Finding:
    often = call.count / observation.steps
    returned = cost * (1 - 1 / often)
    return Finding(
        kind=kind_of(observation, returned),
        what=f"{name} is called {often:.0f} times in each step, for {_bytes(call):,} bytes in the "
        f"mean: {ms(cost)} of each step in the rank that waits least",
        do="put them into one tensor and share it by one call, as DistributedDataParallel does "
        "for gradients during backward",
        where=str(call.site),
        cost_ms=returned,
        is_estimate=True,  # each call also waits for the slowest rank
        parity="rounding",
    )


def _single(observation: Observation, call: Call, name: str, cost: float) -> Finding:
    size = f" of {_bytes(call):,} bytes" if _bytes(call) else ""
    return Finding(
        kind=kind_of(observation, cost),
        what=f"{name}{size} in each step: the ranks wait for one another, {ms(cost)} in the one "
        "that waits least",
        do="share it every N steps, or once after the epoch, where it is only shown",
        where=str(call.site),
        cost_ms=cost,
        is_estimate=True,
        parity="bit-identical",
    )
