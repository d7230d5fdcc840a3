"""Check for input columns that contain the target which the model is to predict."""

from __future__ import annotations

from flatout.doctor.checks.check import Findings, NoSignal, check
from flatout.doctor.checks.signals import at
from flatout.doctor.finding import Finding
from flatout.observe import LeakedTarget, Observation


@check(hooks=True)
def look(observation: Observation) -> Findings:
    """Report targets found in the input, equal or in other units."""
    if not observation.loss_looks:
        raise NoSignal("no loss was checked")
    for leaked in observation.leaked_targets:
        is_copy = leaked.factor == 1
        units = "" if is_copy else f" in other units, by a factor of {leaked.factor:.4g}"
        yield Finding(
            kind="danger",
            what=f"{_place(leaked)} is the target{units}: so in all {leaked.samples:,} samples "
            f"that were checked, with {leaked.values:,} different values",
            do="leave this column out of the input",
            where=at(leaked.site),
            parity="changes learning",
        )


def _place(leaked: LeakedTarget) -> str:
    places, rest = [], leaked.column
    for size in reversed(leaked.shape):
        rest, place = divmod(rest, size)
        places.append(place)
    return f"input[:, {', '.join(map(str, reversed(places)))}]"
