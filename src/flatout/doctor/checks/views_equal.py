"""Check for two views of the same images that should differ, but are bitwise equal."""

from __future__ import annotations

from flatout.doctor.checks.check import Findings, NoSignal, check
from flatout.doctor.checks.signals import at
from flatout.doctor.finding import Finding
from flatout.observe import Observation

_LOOKED = 8
"""Number of steps after which views have been compared."""


@check(hooks=True)
def look(observation: Observation) -> Findings:
    """Report models that get the same images twice in a step, in separate tensors."""
    if observation.steps < _LOOKED:
        raise NoSignal("too few steps were observed to compare the inputs of models")
    for views in observation.equal_views:
        name = views.kind.rpartition(".")[2]
        how = (
            f"both halves of {name}'s batch" if views.is_batch else f"two calls of {name} in a step"
        )
        yield Finding(
            kind="danger",
            what=f"{how} get the same {views.samples:,} pictures bitwise, in each of the "
            f"{views.steps} checked steps, and give the same outputs: they are not two views",
            do="transform each view by itself, and seed neither before it is drawn",
            where=at(views.site),
            parity="changes learning",
        )
