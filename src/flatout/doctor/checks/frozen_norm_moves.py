"""Check for BatchNorm layers with frozen weights that still update their running statistics."""

from __future__ import annotations

from flatout.doctor.checks.check import Findings, check
from flatout.doctor.checks.signals import at, few, models
from flatout.doctor.finding import Finding
from flatout.observe import Observation


@check()
def look(observation: Observation) -> Findings:
    """Report frozen BatchNorm layers that were in train mode when an optimizer stepped."""
    for model in models(observation):
        if names := model.moving_norms:
            yield Finding(
                kind="danger",
                what=f"{len(names)} frozen BatchNorm layers still change: each batch updates "
                f"their running statistics, and is normalized by its own: {few(names)}",
                do="flatout.freeze(model, until=...), which keeps them in evaluation; or call "
                "layer.eval() on each after every model.train()",
                where=at(model.site),
                parity="changes learning",
            )
