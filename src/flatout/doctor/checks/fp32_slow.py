"""All is computed in fp32, though the device has units for bf16."""

from __future__ import annotations

from flatout.doctor.checks.check import Findings, NoSignal, check
from flatout.doctor.checks.signals import (
    SLOW_RATE,
    arithmetic_rate,
    at,
    compute_ms,
    is_gpu,
    is_worth,
    models,
    ms,
    whole_ms,
)
from flatout.doctor.edits.models import autocast
from flatout.doctor.finding import Finding
from flatout.observe import Model, Observation

_FASTER = {"AMX-bf16": 16.0, "AVX512-bf16": 2.0, "Arm bf16": 4.0, "GPU": 16.0}
"""How many times the peak of bf16 is that of fp32 on such units, at most."""

_CORE_RATE = 50e9
"""FLOP per second that a core with such units reaches at least in fp32, in large products."""


@check(edit=autocast)
def look(seen: Observation) -> Findings:
    """Whether a model without autocast computes in fp32 where bf16 units stand idle."""
    trained = models(seen)
    if any("16" in dtype for optimizer in seen.optimizers for dtype in optimizer.dtypes):
        return
    if seen.bf16_units is None:
        raise NoSignal("whether the device has units for bf16 was not seen")
    units = [name for name in _FASTER if name in seen.bf16_units]
    if not units:
        return
    compute = compute_ms(seen, "forward", "backward")
    cost = _arithmetic(seen, trained) * compute * (1 - 1 / max(_FASTER[name] for name in units))
    if not is_worth(seen, cost):
        return
    for model in trained:
        if not model.autocast and _computes(seen, model):
            yield Finding(
                kind="slow",
                what=f"forward and backward take {ms(compute)} of {ms(whole_ms(seen))} in fp32; "
                f"this {'GPU' if is_gpu(seen) else 'CPU'} has units for bf16"
                + ("" if is_gpu(seen) else f" ({seen.bf16_units})"),
                do=f'with torch.autocast("{seen.device.partition(":")[0]}", torch.bfloat16): '
                "around forward and loss; often only together with channels_last",
                where=at(model.site),
                cost_ms=cost,
                is_estimate=True,  # other kernels run, which may be better in other ways
                parity="rounding",
                recipe={"compute.precision": "bf16"},
            )


def _arithmetic(seen: Observation, trained: list[Model]) -> float:
    """The most of forward and backward that arithmetic can be: no dtype makes the rest faster."""
    rates = [_rate(seen, model) for model in trained]
    cores = min(seen.threads or 1, seen.usable_cpus or seen.threads or 1)
    known = [rate for rate in rates if rate is not None]
    return min(1.0, sum(known) / (cores * _CORE_RATE)) if len(known) == len(rates) else 1.0


def _rate(seen: Observation, model: Model) -> float | None:
    return None if is_gpu(seen) else arithmetic_rate(seen, model)


def _computes(seen: Observation, model: Model) -> bool:
    """Whether arithmetic can be what takes the time."""
    rate = _rate(seen, model)
    return rate is None or rate >= SLOW_RATE
