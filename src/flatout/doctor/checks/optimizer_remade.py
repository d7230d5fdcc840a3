"""Check for optimizers that are created again during training, and so lose their averages."""

from __future__ import annotations

from flatout.doctor.checks.check import Findings, NoSignal, check
from flatout.doctor.checks.signals import at
from flatout.doctor.finding import Finding
from flatout.observe import Observation, RemadeOptimizer


@check()
def look(observation: Observation) -> Findings:
    """Report optimizers that live for fewer steps than their averages span."""
    if not observation.optimizers:
        raise NoSignal("no optimizer was observed to step")
    for remade in observation.remade:
        if remade.each < remade.memory:
            yield _finding(remade)


def _finding(remade: RemadeOptimizer) -> Finding:
    name = remade.kind.rpartition(".")[2]
    steps = "step" if remade.each == 1 else f"{remade.each:,} steps"
    return Finding(
        kind="danger",
        what=f"{name} is made again every {steps}, {remade.times} times in {remade.until:,} "
        f"steps, for the same {remade.parameters:,} tensors, which still train: its averages "
        f"begin at zero each time, though they should span about {remade.memory:,} steps",
        do=f"make {name} once, before the loop; set another rate in optimizer.param_groups, or by "
        "a scheduler",
        where=at(remade.site),
        parity="changes learning",
    )
