"""Check for metrics that take a large part of each step."""

from __future__ import annotations

from flatout.doctor.checks.check import Findings, check
from flatout.doctor.checks.signals import calls, cost_ms, is_each_step, ms, share
from flatout.doctor.edits import metrics
from flatout.doctor.finding import Finding
from flatout.observe import Observation

_MUCH = 0.05
"""Share of a step from which on a metric is reported, since some cost in each step is normal."""


@check(edit=metrics.after_loop)
def look(observation: Observation) -> Findings:
    """Report metrics whose share of a step's time exceeds the limit."""
    for call in calls(observation, "metric"):
        cost = cost_ms(observation, call)
        if cost is None or not is_each_step(observation, call) or share(observation, cost) < _MUCH:
            continue
        name = call.detail.get("name") or call.detail.get("kind") or "a metric"
        yield Finding(
            kind="slow",
            what=f"{name} takes {ms(cost)} of each step ({share(observation, cost):.0%})",
            do="keep the predictions, and compute it at the end of the epoch",
            where=str(call.site),
            cost_ms=cost,
            parity="bit-identical",
        )
