"""BatchNorm layers whose weights are frozen go on learning their statistics."""

from __future__ import annotations

from flatout.doctor.checks.check import Findings, check
from flatout.doctor.checks.signals import at, few, models
from flatout.doctor.finding import Finding
from flatout.observe import Observation


@check()
def look(observation: Observation) -> Findings:
    """Layers that were in training when an optimizer stepped, without a parameter that trains."""
    for model in models(observation):
        if names := model.moving_norms:
            yield Finding(
                kind="danger",
                what=f"{len(names)} frozen BatchNorm layers still learn: each batch moves their "
                f"running statistics, and normalizes by its own: {few(names)}",
                do="flatout.freeze(model, until=...), which keeps them in evaluation; or call "
                "layer.eval() on each after every model.train()",
                where=at(model.site),
                parity="changes learning",
            )
