"""Check for torch.cuda.empty_cache() in each step."""

from __future__ import annotations

from flatout.doctor.checks.check import Findings, check
from flatout.doctor.checks.signals import calls, cost_ms, is_each_step, is_gpu, kind_of, lane, ms
from flatout.doctor.edits import removed
from flatout.doctor.finding import Finding
from flatout.observe import Observation


@check(edit=removed.empty_cache)
def look(observation: Observation) -> Findings:
    """Report lines that empty the CUDA cache in most steps. Without a GPU the call does nothing."""
    for call in calls(observation, "empty_cache"):
        own = cost_ms(observation, call)
        if not is_each_step(observation, call):
            continue
        # Forward and backward allocate the returned memory again.
        cost = (own or 0.0) + (
            lane(observation, "forward", "backward") if is_gpu(observation) else 0.0
        )
        takes = "" if own is None else f" ({ms(own)})"
        yield Finding(
            kind=kind_of(observation, cost),
            what=f"empty_cache() in each step{takes}: the next step asks the driver for the "
            "same memory again",
            do="delete the call; it makes no memory free that torch could not use itself",
            where=str(call.site),
            cost_ms=cost,
            parity="bit-identical",
            recipe={"script.empty_cache": "skip"},
        )
