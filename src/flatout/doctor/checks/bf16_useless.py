"""Check for autocast around a model so small that the casts cost more than bf16 saves."""

from __future__ import annotations

from flatout.doctor.checks.check import Findings, NoSignal, check
from flatout.doctor.checks.signals import SLOW_RATE, arithmetic_rate, at, is_gpu, lane, models, ms
from flatout.doctor.finding import Finding
from flatout.observe import Observation


@check()
def look(observation: Observation) -> Findings:
    """Report models under autocast that spend little of their time on arithmetic."""
    cast = [model for model in models(observation) if model.autocast and not model.has_convolutions]
    if is_gpu(observation) or not cast:
        return
    for model in cast:
        rate = arithmetic_rate(observation, model)
        if rate is None:
            raise NoSignal("the shapes of the batches were not observed")
        if rate >= SLOW_RATE:
            continue
        compute = lane(observation, "forward", "backward")
        yield Finding(
            kind="slow",
            what=f"autocast casts to {model.autocast}, but the {ms(compute)} of forward and "
            f"backward are mostly not arithmetic: {model.elements:,} weights need only "
            f"{rate / 1e9:.1g} GFLOP/s",
            do="leave autocast away for a model this small, and measure",
            where=at(model.site),
            cost_ms=compute,
            parity="rounding",
            recipe={"compute.precision": "fp32"},
        )
