"""Check for needless activation checkpointing: memory has room for the activations."""

from __future__ import annotations

from flatout.doctor.checks.check import Findings, NoSignal, check
from flatout.doctor.checks.signals import (
    batches_per_step,
    calls,
    compute_ms,
    cost_ms,
    fits_in_memory,
    is_gpu,
    kind_of,
    lane,
    ms,
)
from flatout.doctor.edits import removed
from flatout.doctor.finding import Finding
from flatout.observe import Observation

_MOST_HELD = 0.8
"""Largest share of a GPU's memory in use without checkpointing; fragmentation needs the rest."""


@check(edit=removed.checkpointing)
def look(observation: Observation) -> Findings:
    """Report checkpointing whose saved activations would fit into free memory."""
    made = calls(observation, "checkpoint")
    if not made:
        return
    if observation.checkpointed_mb is None:
        raise NoSignal("the memory that checkpointing saves was not observed")
    mb = observation.checkpointed_mb / batches_per_step(observation)
    free = _free_mb(observation)
    if free is None:
        raise NoSignal("the free memory was not observed")
    if not _fits(observation, mb):
        return
    cost = _cost_ms(observation, sum(cost_ms(observation, call) or 0.0 for call in made))
    often = sum(call.count for call in made) / observation.steps
    yield Finding(
        kind=kind_of(observation, cost),
        what=f"{often:.0f} parts of forward are computed again in each step, about {ms(cost)}, so "
        f"that {mb:,.0f} MB are not kept for backward: {free:,.0f} MB are free",
        do="call them without torch.utils.checkpoint, as with gradient_checkpointing=False; or "
        "checkpoint fewer of them",
        where=str(made[0].site),
        cost_ms=cost,
        is_estimate=True,
        parity="bit-identical",
    )


def _free_mb(observation: Observation) -> float | None:
    if not is_gpu(observation):
        return observation.available_mb
    if observation.device_total_mb is None or observation.device_peak_mb is None:
        return None
    return observation.device_total_mb - observation.device_peak_mb


def _fits(observation: Observation, mb: float) -> bool:
    if not is_gpu(observation):
        return fits_in_memory(observation, mb)
    held = (observation.device_peak_mb or 0.0) + mb
    return held <= _MOST_HELD * (observation.device_total_mb or 0.0)


def _cost_ms(observation: Observation, host: float) -> float:
    if not is_gpu(observation):
        return host
    share = min(1.0, host / max(lane(observation, "forward"), 1e-9))
    return share * compute_ms(observation, "forward")
