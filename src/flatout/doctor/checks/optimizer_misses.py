"""Parameters that get gradients are in no optimizer."""

from __future__ import annotations

from flatout.doctor.checks.check import Findings, check
from flatout.doctor.checks.signals import at, few, models
from flatout.doctor.finding import Finding
from flatout.observe import Observation


@check()
def look(seen: Observation) -> Findings:
    """Parameters of a stepped model that had a gradient, and that no optimizer has."""
    for model in models(seen):
        if names := model.not_stepped:
            shapes = [shape for one in seen.optimizers for shape in one.orphans]
            instead = f"; it holds {few(shapes)} in their place" if shapes else ""
            yield Finding(
                kind="danger",
                what=f"{len(names)} parameters get gradients but are in no optimizer, and stay as "
                f"they were made: {few(names)}{instead}",
                do="make the optimizer when all layers are there; or set requires_grad to False "
                "for what is to stay",
                where=at(model.site),
                parity="changes learning",
            )
