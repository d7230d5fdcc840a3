"""Check for global batches larger than those of published recipes."""

from __future__ import annotations

from flatout.doctor.checks.check import Findings, NoSignal, check
from flatout.doctor.checks.signals import (
    at,
    batches_per_step,
    made,
    samples_per_call,
    step_ms,
    training_loaders,
)
from flatout.doctor.finding import Finding
from flatout.observe import Loader, Observation

_SGD = (8_192, 156)
"""Number of samples of the largest published batch with SGD, and its steps per epoch (Goyal et al.

2017).
"""

_LAYERWISE = (32_768, 39)
"""Number of samples of the largest batch with LARS or LAMB, and its steps per epoch (You et al.

2017, 2020).
"""


@check()
def look(observation: Observation) -> Findings:
    """Report steps with more samples, and epochs with fewer steps, than published recipes have."""
    step_ms(observation)
    at_once = samples_per_call(observation)
    if at_once is None:
        raise NoSignal("the number of samples in a step varies, or was not observed")
    batch = round(at_once * batches_per_step(observation) * observation.world_size)
    tried, steps_tried = _LAYERWISE if _is_layerwise(observation) else _SGD
    if batch <= tried:
        return
    loader = max(training_loaders(observation), key=lambda loader: loader.batches)
    steps = _steps_per_epoch(loader, batch, observation.world_size)
    if steps >= steps_tried:
        return
    yield Finding(
        kind="note",
        what=f"a step has {batch:,} samples, an epoch {max(1, round(steps)):,} steps: beyond "
        f"what was tried ({tried:,} samples, {steps_tried} steps an epoch)",
        do="compare the validation figures with those of a smaller batch; else LARS or LAMB "
        "(flatout.optim.Lars, Lamb), and warm-up over the first epochs",
        where=at(made(loader)),
        parity="changes learning",
    )


def _is_layerwise(observation: Observation) -> bool:
    names = {optimizer.kind.rpartition(".")[2].lower() for optimizer in observation.optimizers}
    return any("lars" in name or "lamb" in name for name in names)


def _steps_per_epoch(loader: Loader, batch: int, ranks: int) -> float:
    if loader.length is None:
        raise NoSignal("the number of samples in an epoch was not observed")
    copies = 1 if loader.is_distributed else ranks  # otherwise each rank reads all samples
    return loader.length * copies / batch
