"""Check for pauses of a step by Python's garbage collector."""

from __future__ import annotations

from flatout.doctor.checks.check import check
from flatout.doctor.checks.signals import calls, cost_ms, is_each_step, is_worth, lane, ms
from flatout.doctor.edits import removed
from flatout.doctor.finding import Finding
from flatout.observe import Call, Observation

_SEVERAL = 3
"""Minimum number of steps with collections: a late import causes collections in one step only."""


@check(edit=removed.collect)
def look(observation: Observation) -> list[Finding]:
    """Report collections that take much time, either requested in each step or automatic."""
    asked = [
        call
        for call in calls(observation, "gc")
        if is_each_step(observation, call) and _is_full(call)
    ]
    findings = [
        _finding(f"gc.collect() runs in each step{_takes(cost)}", "delete the call", site, cost)
        for site, cost in ((str(call.site), cost_ms(observation, call)) for call in asked)
        if is_worth(observation, cost)
    ]
    if findings:
        return findings
    pauses = lane(observation, "gc")
    collected = sum(call.steps for call in calls(observation, "gc"))
    if not is_worth(observation, pauses) or 0 < collected < _SEVERAL:
        return []
    do = (
        "gc.freeze() after the model and the dataset are made, gc.disable() in training, and "
        "gc.collect() between epochs"
    )
    return [_finding(f"garbage collection takes {ms(pauses)} of each step", do, "", pauses)]


def _is_full(call: Call) -> bool:
    return bool(call.detail.get("generation", 2) == 2)


def _takes(cost: float | None) -> str:
    return "" if cost is None else f", which takes {ms(cost)}"


def _finding(what: str, do: str, where: str, cost: float | None) -> Finding:
    return Finding(
        kind="slow",
        what=what,
        do=do,
        where=where,
        cost_ms=cost,
        # A collection visits all objects, which evicts the CPU's caches before the next step.
        is_estimate=True,
        parity="bit-identical",
        recipe={"script.garbage": "scheduled"},
    )
