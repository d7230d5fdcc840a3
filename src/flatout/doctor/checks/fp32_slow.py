"""Check for fp32 computation on a device with units for bf16."""

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
"""Largest ratio of peak FLOP rates, bf16 over fp32, by the kind of units."""

_CORE_RATE = 50e9
"""Minimum FLOP per second of a core with bf16 units in large fp32 matrix products."""


@check(edit=autocast)
def look(observation: Observation) -> Findings:
    """Report models without autocast that compute in fp32 while bf16 units are unused."""
    trained = models(observation)
    if any("16" in dtype for optimizer in observation.optimizers for dtype in optimizer.dtypes):
        return
    if observation.bf16_units is None:
        raise NoSignal("the device's support of bf16 was not observed")
    units = [name for name in _FASTER if name in observation.bf16_units]
    if not units:
        return
    compute = compute_ms(observation, "forward", "backward")
    cost = (
        _arithmetic(observation, trained) * compute * (1 - 1 / max(_FASTER[name] for name in units))
    )
    if not is_worth(observation, cost):
        return
    for model in trained:
        if not model.autocast and _computes(observation, model):
            yield Finding(
                kind="slow",
                what=f"forward and backward take {ms(compute)} of {ms(whole_ms(observation))} in "
                f"fp32; this {'GPU' if is_gpu(observation) else 'CPU'} has units for bf16"
                + ("" if is_gpu(observation) else f" ({observation.bf16_units})"),
                do=f'with torch.autocast("{observation.device.partition(":")[0]}", '
                "torch.bfloat16): around forward and loss; often only together with channels_last",
                where=at(model.site),
                cost_ms=cost,
                is_estimate=True,  # other kernels run, which may be faster for other reasons
                parity="rounding",
                recipe={"compute.precision": "bf16"},
            )


def _arithmetic(observation: Observation, trained: list[Model]) -> float:
    rates = [_rate(observation, model) for model in trained]
    cores = min(observation.threads or 1, observation.usable_cpus or observation.threads or 1)
    known = [rate for rate in rates if rate is not None]
    return min(1.0, sum(known) / (cores * _CORE_RATE)) if len(known) == len(rates) else 1.0


def _rate(observation: Observation, model: Model) -> float | None:
    return None if is_gpu(observation) else arithmetic_rate(observation, model)


def _computes(observation: Observation, model: Model) -> bool:
    rate = _rate(observation, model)
    return rate is None or rate >= SLOW_RATE
