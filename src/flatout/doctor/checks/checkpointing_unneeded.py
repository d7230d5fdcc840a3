"""Activations are computed again in backward, though there is memory to keep them."""

from __future__ import annotations

from flatout.doctor.checks.check import Findings, NoSignal, check
from flatout.doctor.checks.signals import at, is_gpu, kind_of, lane
from flatout.doctor.finding import Finding
from flatout.observe import Observation

_TAKEN = 0.5
"""Of the free memory that activations may take: longer batches and the allocator need the rest."""


@check()
def look(seen: Observation) -> Findings:
    """Whether what checkpointing leaves out would fit into the memory that is free."""
    if not seen.steps:
        raise NoSignal("no step was seen")
    found = seen.recomputed
    if found is None or not found.mb:
        return
    free = _free_mb(seen)
    if found.mb > _TAKEN * free:
        return
    cost = lane(seen, "forward")
    yield Finding(
        kind=kind_of(seen, cost),
        what=f"activation checkpointing computes parts of forward twice to save {found.mb:,.0f} MB "
        f"a step, and {free:,.0f} MB are free",
        do="leave checkpoint() out, or gradient_checkpointing=True; keep it where a larger batch "
        "needs the memory",
        where=at(found.site),
        cost_ms=cost,
        parity="bit-identical",
    )


def _free_mb(seen: Observation) -> float:
    if is_gpu(seen):
        if seen.device_total_mb is None or seen.device_peak_mb is None:
            raise NoSignal("the GPU's memory was not seen")
        return seen.device_total_mb - seen.device_peak_mb
    if seen.available_mb is None:
        raise NoSignal("the free memory was not seen")
    return seen.available_mb
