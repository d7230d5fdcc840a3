"""Check for denormal numbers, with which a CPU computes many times slower."""

from __future__ import annotations

from collections.abc import Sequence

from flatout.doctor.checks.check import Findings, NoSignal, check
from flatout.doctor.checks.signals import at, is_gpu, is_worth, lane, models, ms
from flatout.doctor.finding import Finding
from flatout.observe import Model, Observation, Optimizer

_MANY = 0.01
"""Smallest share of denormals in a tensor: an operator takes a hundred times as long for each."""


@check()
def look(observation: Observation) -> list[Finding]:
    """Report tensors with many denormals, on a CPU that does not flush them to zero."""
    if is_gpu(observation):
        return []
    trained = models(observation)
    if all(model.subnormal_share is None for model in trained):
        raise NoSignal("the numbers of the model were not checked")
    # A step of the optimizer alone computes with the optimizer's moments.
    findings = [
        *_finding(observation, trained, "the model", ("forward", "backward", "optimizer")),
        *_finding(observation, observation.optimizers, "the optimizer", ("optimizer",)),
    ]
    return findings[:1]  # the same setting cures both


def _finding(
    observation: Observation,
    owners: Sequence[Model] | Sequence[Optimizer],
    of: str,
    lanes: Sequence[str],
) -> Findings:
    cost = lane(observation, *lanes)
    took = "forward, backward and optimizer take" if len(lanes) > 1 else "its steps take"
    if not is_worth(observation, cost):
        return
    for owner in owners:
        if (owner.subnormal_share or 0.0) >= _MANY:
            yield Finding(
                kind="slow",
                what=f"up to {owner.subnormal_share:.0%} of the numbers in a tensor of {of} are "
                f"subnormal (below 1.2e-38); {took} {ms(cost)}",
                do="torch.set_flush_denormal(True) at the start, before anything is computed",
                where=at(owner.site),
                cost_ms=cost,
                parity="rounding",
                recipe={"process.flush_denormals": "on"},
            )
