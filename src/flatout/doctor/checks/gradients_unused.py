"""Backward computes gradients that no optimizer uses, or that another loss's step uses."""

from __future__ import annotations

from pathlib import Path

from flatout.doctor.checks.check import Findings, NoSignal, check
from flatout.doctor.checks.signals import at, is_worth
from flatout.doctor.finding import Finding
from flatout.observe import Observation, Site, UnusedGradients

_LEAST = 2
"""Backward passes after which nothing is said yet."""

_WEIGHTS = 0.5
"""Of the backward of layers that the gradient has to pass through, what is left out without the
gradients of their weights."""


@check(lane="backward")
def look(observation: Observation) -> Findings:
    """Whether a loss reaches what its optimizer does not step, and to which end."""
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
    """What they take of backward, were all numbers equally dear."""
    backward = observation.lanes_ms.get("backward")
    if backward is None:
        return None
    return backward * item.share * (_WEIGHTS if item.passes_on else 1.0)


def _numbers(item: UnusedGradients) -> str:
    of = f"{item.model}'s " if item.model else ""
    return f"{of}{item.parameters} parameters ({item.elements:,} numbers)"


def _added(item: UnusedGradients) -> Finding:
    return Finding(
        kind="danger",
        what=f"this loss is for the optimizer stepped at {_place(item.stepped_at)}, but reaches "
        f"{_numbers(item)} of another optimizer too: its gradients are still there when that one "
        "steps, and are added to those of its own loss",
        do=_detach(item) + ", and zero_grad() before each backward",
        where=at(item.backward_at),
        parity="changes learning",
    )


def _zeroed(item: UnusedGradients, cost: float | None) -> Finding:
    return Finding(
        kind="slow",
        what=f"this loss is for the optimizer stepped at {_place(item.stepped_at)}, but its "
        f"backward goes on through {_numbers(item)} of another, which zeroes them before it steps",
        do=_detach(item),
        where=at(item.backward_at),
        cost_ms=cost,
        is_estimate=True,
        parity="bit-identical",
    )


def _kept(item: UnusedGradients, cost: float | None) -> Finding:
    takes = f"; they are about {item.share:.0%} of all that backward computes"
    return Finding(
        kind="slow",
        what=f"backward computes gradients for {_numbers(item)}, which no optimizer has: they add "
        f"up from step to step, and nothing reads them{takes if cost is not None else ''}",
        do=f"requires_grad_(False) on {item.model or 'it'}: the gradient still passes through"
        if item.passes_on
        else f"call {item.model or 'it'} within torch.no_grad(); or give it to the optimizer, "
        "where it is to learn",
        where=at(item.called_at or item.backward_at),
        cost_ms=cost,
        is_estimate=True,
        parity="bit-identical",
    )


def _detach(item: UnusedGradients) -> str:
    called = f" at {_place(item.called_at)}" if item.called_at else ""
    return f"detach() what comes from {item.model or 'the other model'}{called} for this loss"


def _place(site: Site | None) -> str:
    return "" if site is None else f"{Path(site.file).name}:{site.line}"
