"""Check for layers in a plain list or dict, whose parameters are not registered."""

from __future__ import annotations

from flatout.doctor.checks.check import Findings, check
from flatout.doctor.checks.signals import at, few, models
from flatout.doctor.finding import Finding
from flatout.observe import Observation


@check()
def look(observation: Observation) -> Findings:
    """Report parameters with gradients in lists of a called model that no optimizer has."""
    for model in models(observation):
        if names := model.unregistered:
            yield Finding(
                kind="danger",
                what=f"{len(names)} parameters get gradients, but are neither in model.parameters()"
                f" nor in an optimizer, and stay as they were made: {few(names)}",
                do="nn.ModuleList or nn.ModuleDict in place of the list or dict; files saved "
                "before lack them",
                where=at(model.site),
                parity="changes learning",
            )
