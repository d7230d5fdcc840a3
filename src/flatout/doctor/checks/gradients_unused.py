"""Check for gradients that no optimizer uses, or that another loss's step uses."""

from __future__ import annotations

from pathlib import Path

from flatout.doctor.checks.check import Findings, NoSignal, check
from flatout.doctor.checks.signals import at, is_worth
from flatout.doctor.finding import Finding
from flatout.observe import Observation, Site, UnusedGradients

_LEAST = 2
"""Minimum number of backward passes for a conclusion."""

_WEIGHTS = 0.5
"""Share of a layer's backward time that the gradients of its weights take.

This time can be saved in layers that only pass the gradient on.
"""


@check(lane="backward")
def look(observation: Observation) -> Findings:
    """Report losses whose gradients reach parameters that their optimizer does not step."""
    if observation.gradient_uses < _LEAST and _has_several(observation):
        raise NoSignal("no backward pass was followed to the step that uses its gradients")
    for item in observation.unused_gradients:
        if item.fate == "added":
            yield _added(item)
            continue
        cost = _cost_ms(observation, item)
        if is_worth(observation, cost):
            yield _kept(item, cost) if item.fate == "kept" else _zeroed(item, cost)


def _has_several(observation: Observation) -> bool:
    return len(observation.optimizers) > 1 or len(observation.models) > 1


def _cost_ms(observation: Observation, item: UnusedGradients) -> float | None:
    backward = observation.lanes_ms.get("backward")
    if backward is None:
        return None
    return backward * item.share * (_WEIGHTS if item.passes_on else 1.0)


def _model(item: UnusedGradients) -> str:
    if not item.model:
        return "another model"
    return f"the {item.model} called at {_place(item.called_at)}" if item.called_at else item.model


def _numbers(item: UnusedGradients) -> str:
    return f"{item.parameters} parameters ({item.elements:,} numbers)"


def _added(item: UnusedGradients) -> Finding:
    return Finding(
        kind="danger",
        what=f"this loss is for the optimizer stepped at {_place(item.stepped_at)}, but its "
        f"gradients stay in {_model(item)}, too: the optimizer of that model steps by these "
        f"gradients in addition to the gradients of its own loss, {_numbers(item)}",
        do=f"{_detach(item)}, and zero_grad() before each backward",
        where=at(item.backward_at),
        parity="changes learning",
    )


def _zeroed(item: UnusedGradients, cost: float | None) -> Finding:
    return Finding(
        kind="slow",
        what=f"backward goes on into {_model(item)}: the optimizer stepped at "
        f"{_place(item.stepped_at)} does not have its {_numbers(item)}, and the model's own "
        "optimizer zeroes their gradients before it steps",
        do=_detach(item),
        where=at(item.backward_at),
        cost_ms=cost,
        is_estimate=True,
        parity="bit-identical",
    )


def _kept(item: UnusedGradients, cost: float | None) -> Finding:
    name = item.model or "a model"
    return Finding(
        kind="slow",
        what=f"no optimizer steps {name}'s {_numbers(item)}, but backward computes their "
        f"gradients, about {item.share:.0%} of all gradients: they add up from step to step, "
        "and nothing reads them",
        do=f"requires_grad_(False) on {name}: the gradient still passes through it"
        if item.passes_on
        else f"with torch.no_grad(): around this call; or give {name} to the optimizer, if it is "
        "to be trained",
        where=at(item.called_at or item.backward_at),
        cost_ms=cost,
        is_estimate=True,
        parity="bit-identical",
    )


def _detach(item: UnusedGradients) -> str:
    return f"detach() what {_model(item)} gives, for this loss"


def _place(site: Site | None) -> str:
    return "" if site is None else f"{Path(site.file).name}:{site.line}"
