"""Check for memory that is returned to the system and allocated again in each step."""

from __future__ import annotations

from flatout.doctor.checks.check import Findings, NoSignal, check
from flatout.doctor.checks.signals import is_gpu, is_worth, ms, step_ms
from flatout.doctor.finding import Finding
from flatout.observe import Observation

KEEP = {"memory.allocator": "keep"}
"""The cure, as changes of a Recipe."""

_FAULT_MS = 1e-3
"""Milliseconds of a page fault, which takes 0.2 to 1 microseconds, or longer in some VMs."""


@check()
def look(observation: Observation) -> Findings:
    """Report page faults that take much time on a CPU."""
    if is_gpu(observation):
        return
    if observation.page_faults is None:
        raise NoSignal("page faults were not counted")
    cost = min(step_ms(observation), observation.page_faults * _FAULT_MS)
    if not is_worth(observation, cost):
        return
    yield Finding(
        kind="slow",
        what=f"{observation.page_faults:,.0f} page faults in each step, about {ms(cost)}: the "
        "allocator gives its memory back and asks for it again",
        do="let glibc keep it: flatout run --set memory.allocator=keep script.py",
        cost_ms=cost,
        is_estimate=True,
        parity="bit-identical",
        recipe=dict(KEEP),
    )
