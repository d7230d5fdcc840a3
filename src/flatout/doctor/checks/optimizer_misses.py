"""Check for parameters with gradients that no optimizer has."""

from __future__ import annotations

from flatout.doctor.checks.check import Findings, check
from flatout.doctor.checks.signals import at, few, kind_of, models
from flatout.doctor.finding import Finding
from flatout.observe import Model, Observation


@check()
def look(observation: Observation) -> Findings:
    """Report parameters of a stepped model that had a gradient and that no optimizer has."""
    for model in models(observation):
        if model.moved:
            yield _of_average(observation, model)
        if names := model.not_stepped:
            if model.misses_first and not any(
                optimizer.orphans for optimizer in observation.optimizers
            ):
                yield _of_head(model)
                continue
            shapes = [shape for optimizer in observation.optimizers for shape in optimizer.orphans]
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


def _of_head(model: Model) -> Finding:
    names = model.not_stepped
    return Finding(
        kind="note",
        what=f"backward computes gradients for the first {len(names)} parameters of the model, "
        f"which no optimizer has: {few(names)}",
        do="requires_grad_(False) on them, where only the layers after them are to train: that "
        "saves their backward; else give them to the optimizer",
        where=at(model.site),
        parity="bit-identical",
    )


def _of_average(observation: Observation, model: Model) -> Finding:
    names, backward = model.moved, observation.lanes_ms.get("backward")
    cost = None if backward is None else backward * model.moved_share
    return Finding(
        kind=kind_of(observation, cost),
        what=f"backward computes gradients for {len(names)} parameters that no optimizer has, and "
        f"that the script changes itself, as a moving average: {few(names)}",
        do="call what they belong to under torch.no_grad()",
        where=at(model.site),
        cost_ms=cost,
        is_estimate=True,
        parity="bit-identical",
    )
