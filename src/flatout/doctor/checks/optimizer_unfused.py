"""Check for optimizers of torch that could step in one fused kernel."""

from __future__ import annotations

from flatout.doctor.checks.check import Findings, check
from flatout.doctor.checks.signals import at, calls, cost_ms, kind_of, lane, ms
from flatout.doctor.edits import arguments
from flatout.doctor.finding import Finding
from flatout.observe import Observation, Optimizer

_FUSES = ("SGD", "Adam", "AdamW", "Adagrad")
"""Optimizers of torch.optim that accept fused=True."""


@check(edit=arguments.fuse)
def look(observation: Observation) -> Findings:
    """Report optimizers of torch that step unfused although a fused kernel exists."""
    unfused = [optimizer for optimizer in observation.optimizers if _could_fuse(optimizer)]
    if not unfused:
        return
    # The optimizer lane includes zero_grad, which is no part of a step.
    zeroed = sum(cost_ms(observation, call) or 0.0 for call in calls(observation, "zero_grad"))
    stepped = max(0.0, lane(observation, "optimizer") - zeroed)
    for optimizer in unfused:
        cost = stepped * optimizer.step_share
        yield Finding(
            kind=kind_of(observation, cost),
            what=f"{optimizer.kind.rpartition('.')[2]} steps {optimizer.parameters} tensors one "
            f"operator after the other, in {ms(cost)}",
            do=f"torch.optim.{optimizer.kind.rpartition('.')[2]}(..., fused=True)",
            where=at(optimizer.site),
            cost_ms=cost,
            parity="rounding",
            recipe={"compute.fused_optimizer": "on"},
        )


def _could_fuse(optimizer: Optimizer) -> bool:
    package, _, name = optimizer.kind.rpartition(".")
    return package.startswith("torch.optim") and name in _FUSES and not optimizer.fused
