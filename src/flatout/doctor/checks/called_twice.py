"""Check for models that are called twice for one result."""

from __future__ import annotations

from flatout.doctor.checks.check import Findings, NoSignal, check
from flatout.doctor.checks.signals import EVERY, at, kind_of, lane, models
from flatout.doctor.finding import Finding
from flatout.observe import Model, Observation

_RANDOM = ("Dropout", "DropPath")
_LEAST = 8


@check(lane="forward")
def look(observation: Observation) -> Findings:
    """Report calls that repeat the previous one: same input, weights, random state and step."""
    if not any(model.repeats_of >= _LEAST for model in models(observation)):
        raise NoSignal("too few calls of the model were observed in training")
    for model in observation.models:
        is_each = model.repeats >= EVERY * model.repeats_of / 2
        if model.repeats_of < _LEAST or not is_each or _draws(model):
            continue
        cost = lane(observation, "forward") / 2
        yield Finding(
            kind=kind_of(observation, cost),
            what=f"{model.repeats} of {model.repeats_of} calls of the model repeat the one before: "
            "the same input, with the same weights and random state",
            do="call it once, and keep the result for the loss, metrics and logs",
            where=at(model.site),
            cost_ms=cost,
            parity="bit-identical",
        )


def _draws(model: Model) -> bool:
    return any(name in layer for layer in model.layers for name in _RANDOM)
