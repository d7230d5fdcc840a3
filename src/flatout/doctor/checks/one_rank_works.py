"""Check for one rank that evaluates, saves or logs between steps while the other ranks wait."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from flatout.doctor.checks.check import Findings, rank_check
from flatout.doctor.checks.signals import HUNGRY, at, calls, cost_ms, has_peers, lane, ms
from flatout.doctor.finding import Finding
from flatout.measure import LANES
from flatout.observe import Observation

_WORK = {"evaluation": "evaluating", "saving": "saving", "log": "telling and measuring"}
"""Lanes of work that one rank may do for all ranks, with a description of each."""

_LOGS = ("log", "print", "metric")
"""Kinds of calls between steps that count as work; the host lane may include barrier waits."""

_STALLED = 0.5
"""Share of the working rank's time that the other ranks must be observed to wait."""

_SHARED = 0.25
"""Share of the working rank's time from which on other ranks count as doing the same work."""


@rank_check()
def look(observations: Sequence[Observation]) -> Findings:
    """Report a rank with far more such work, if the steps of the other ranks last as long."""
    if not has_peers(observations):
        return
    by_rank = [{work: _excess(rank, observations, work) for work in _WORK} for rank in observations]
    alone = max(range(len(observations)), key=lambda place: sum(by_rank[place].values()))
    excess, busy = by_rank[alone], observations[alone]
    cost = sum(excess.values())
    others = fmean(_whole(rank) for rank in observations if rank is not busy)
    waited = cost - max(0.0, _whole(busy) - others)
    if cost < HUNGRY * _whole(busy) or waited < _STALLED * cost:
        return
    most = max(excess, key=lambda name: excess[name])
    yield Finding(
        kind="slow",
        what=f"rank {busy.rank} spends {ms(excess[most])} per step more than the others "
        f"{_WORK[most]}, and they wait for it",
        do=_do(most),
        where=_where(most, busy),
        cost_ms=min(cost, waited),
        parity="bit-identical",
    )


def _excess(rank: Observation, observations: Sequence[Observation], work: str) -> float:
    others = fmean(_spent(other, work) for other in observations if other is not rank)
    own = _spent(rank, work)
    return 0.0 if others >= _SHARED * own else own - others


def _spent(rank: Observation, work: str) -> float:
    if work != "log":
        return lane(rank, work)
    return sum(cost_ms(rank, call) or 0.0 for call in calls(rank, *_LOGS))


def _whole(rank: Observation) -> float:
    return sum(rank.lanes_ms.get(name) or 0.0 for name in LANES)


def _do(work: str) -> str:
    if work == "evaluation":
        return (
            "give each rank its part of the validation set, and add up the sums and counts with "
            "all_reduce; or evaluate less often"
        )
    if work == "saving":
        return "save less often, or copy the weights and write them in a thread"
    return "do it on all ranks in parts, in a thread, or less often"


def _where(work: str, rank: Observation) -> str:
    if work == "evaluation":
        return at(rank.evaluation_site)
    dearest = calls(rank, *(("save",) if work == "saving" else _LOGS))
    return str(dearest[0].site) if dearest else ""
