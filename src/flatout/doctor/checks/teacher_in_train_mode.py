"""Check for models that are never trained, such as teachers, but compute in train mode."""

from __future__ import annotations

from flatout.doctor.checks.check import Findings, NoSignal, check
from flatout.doctor.checks.signals import at
from flatout.doctor.finding import Finding
from flatout.observe import Observation, Teacher

_LOOKED = 8
"""Number of steps after which untrained models have been detected."""


@check(hooks=True)
def look(observation: Observation) -> Findings:
    """Report models that no optimizer steps, called in each step with layers in train mode."""
    if observation.steps < _LOOKED:
        raise NoSignal("too few steps were observed to tell which models are not trained")
    for teacher in observation.teachers:
        name = teacher.kind.rpartition(".")[2]
        yield Finding(
            kind="danger",
            what=f"{name} is called in each step and never trained, but in train mode: "
            f"{_layers(teacher)}{_shown(teacher)}",
            do=f"eval() on {name} once, before the loop; again wherever train() reaches it",
            where=at(teacher.site),
            parity="changes learning",
        )


def _layers(teacher: Teacher) -> str:
    most = sorted(teacher.layers.items(), key=lambda item: -item[1])
    return ", ".join(f"{count} {kind}" for kind, count in most)


def _shown(teacher: Teacher) -> str:
    words = ""
    if teacher.dropped:
        words += f"; the first dropout has set {teacher.dropped:.0%} of its numbers to zero"
        words += ", other numbers for the same sample each time"
    if teacher.moved:
        words += f"; in 4 steps the running statistics of {teacher.moved} have changed"
    return words
