"""Check for gradient accumulation that sums gradients over all ranks in each micro-step."""

from __future__ import annotations

from flatout.doctor.checks.check import Findings, check
from flatout.doctor.checks.signals import at, batches_per_step, calls, is_worth, models
from flatout.doctor.finding import Finding
from flatout.observe import Observation


@check(lane="sync")
def look(observation: Observation) -> Findings:
    """Report several backward passes per step under DDP, without no_sync."""
    backwards = batches_per_step(observation)
    wrapped = [m for m in models(observation) if m.wrapper == "DistributedDataParallel"]
    if not wrapped or backwards < 2 or calls(observation, "no_sync"):
        return
    sync = observation.lanes_ms.get("sync")
    accumulating = [
        optimizer for optimizer in observation.optimizers if optimizer.backwards == backwards
    ]
    cost = None if sync is None else sync * (1 - 1 / backwards)
    if not is_worth(observation, cost):
        return
    yield Finding(
        kind="slow",
        what=f"{backwards:g} backward passes go into a step, and each of them adds the "
        "gradients up over all ranks; once would do",
        do="with model.no_sync(): around forward and backward of all micro-steps but the last",
        where=at(accumulating[0].backward_site or wrapped[0].site),
        cost_ms=cost,
        is_estimate=True,  # each sum also waits for the slowest rank
        parity="rounding",
        recipe={"script.gradient_sync": "last_backward"},
    )
