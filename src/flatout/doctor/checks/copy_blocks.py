"""Check for copies from pinned memory to the GPU for which the host waits nevertheless."""

from __future__ import annotations

from flatout.doctor.checks.check import Findings, check
from flatout.doctor.checks.signals import (
    calls,
    cost_ms,
    is_each_step,
    is_gpu,
    is_worth,
    ms,
    returned_ms,
)
from flatout.doctor.edits import devices
from flatout.doctor.finding import Finding
from flatout.observe import Observation


@check(edit=devices.do_not_block)
def look(observation: Observation) -> Findings:
    """Report lines that copy from pinned memory without non_blocking, in most steps."""
    result = calls(observation, "to_device")
    # Pinned batches of a loader are new memory each: nothing overwrites them during the copy.
    if not is_gpu(observation) or not any(
        loader.in_training and loader.pin_memory for loader in observation.loaders
    ):
        return
    for call in result:
        is_blocking = call.detail.get("pinned") and not call.detail.get("non_blocking")
        own = cost_ms(observation, call)
        cost = returned_ms(observation, own)
        if own is None or not is_blocking or not is_each_step(observation, call):
            continue
        if not is_worth(observation, cost):
            continue
        yield Finding(
            kind="slow",
            what="the copy to the GPU comes from pinned memory, but the host still waits for it, "
            f"and for all earlier work of the GPU: {ms(own)} per step",
            do=".to(device, non_blocking=True): the GPU does first what was queued first",
            where=str(call.site),
            cost_ms=cost,
            parity="bit-identical",
        )
