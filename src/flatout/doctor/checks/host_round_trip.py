"""Check for tensors that are copied from the GPU to the host and back within a step."""

from __future__ import annotations

from flatout.doctor.checks.check import check
from flatout.doctor.checks.signals import calls, cost_ms, is_each_step, is_gpu, kind_of, ms
from flatout.doctor.finding import Finding
from flatout.observe import Call, Observation


@check()
def look(observation: Observation) -> list[Finding]:
    """Report lines that in most steps copy back a tensor which came to the host in that step."""
    round_trips = [
        call for call in calls(observation, "round_trip") if is_each_step(observation, call)
    ]
    return (
        [_finding(observation, call, cost_ms(observation, call)) for call in round_trips]
        if is_gpu(observation)
        else []
    )


def _finding(observation: Observation, call: Call, cost: float | None) -> Finding:
    way = "" if cost is None else f"; the way back alone takes {ms(cost)}"
    return Finding(
        kind=kind_of(observation, cost),
        what="a tensor is copied from the GPU to the host and back in each step, and the host "
        f"waits for the GPU meanwhile{way}",
        do="keep it on the GPU: leave .cpu() and .to(device) away, and do what lies between them "
        "with torch",
        where=str(call.site),
        cost_ms=cost,
        is_estimate=True,  # the wait for the GPU at the copy to the host is left out
        parity="bit-identical",
    )
