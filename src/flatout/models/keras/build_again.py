"""Rebuilding of a Keras optimizer over other variables, with its state kept.

Keras builds an optimizer once, over the variables that train at that time. After it is built again,
it has new state variables in the order of the new trainable variables, as a `.keras` file of the
model needs them. The previous values of state variables and counts are restored.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from flatout.errors import ModelError

# Names of an optimizer's attributes in which Keras keeps the model's variables.
_KEPT = ("_variables", "_trainable_variables", "_trainable_variables_indices", "_tracker")


@torch.no_grad()
def build_again(optimizer: Any, variables: Sequence[Any]) -> None:
    """Build a built Keras optimizer over these variables; known variables keep their state."""
    if (inner := getattr(optimizer, "inner_optimizer", None)) is not None:
        build_again(inner, variables)
    old, tracked = list(optimizer._trainable_variables), list(optimizer._variables)
    before = {name: _copied(v) for name, v in vars(optimizer).items() if name not in _KEPT}
    optimizer.built = False
    vars(optimizer)["_trainable_variables_indices"] = {}
    optimizer.build(list(variables))
    places = {id(variable): place for place, variable in enumerate(variables)}
    order = [places.get(id(variable)) for variable in old]
    for name, was in before.items():
        for slot, new in _pairs(was, vars(optimizer).get(name), order):
            if new is not None:
                new.assign(slot)
            optimizer._tracker.untrack(slot)
    own = (value for name, value in vars(optimizer).items() if name not in _KEPT)
    held = {id(item) for value in own for item in _within(value)}
    if any(id(slot) not in held for slot in tracked if _is_tracked(optimizer, slot)):
        raise ModelError(
            f"{type(optimizer).__name__} does not tell which part of its state is of which weight, "
            "so it takes no more weights",
            do="keep what it has of a weight in a list in the order of `build`, as Keras' own do",
        )
    if optimizer.use_ema:
        known = {id(variable) for variable in old}
        averages = zip(optimizer._model_variables_moving_average, variables, strict=True)
        for average, variable in averages:
            if id(variable) not in known and average is not None:
                average.assign(variable)  # as in an optimizer's first step


def _is_tracked(optimizer: Any, slot: Any) -> bool:
    return bool(optimizer._tracker.is_in_store("variables", slot))


def _copied(value: Any) -> Any:
    if isinstance(value, list):
        return list(value)
    return dict(value) if isinstance(value, dict) else value


def _pairs(was: Any, now: Any, order: Sequence[int | None]) -> Iterator[tuple[Any, Any]]:
    if isinstance(was, (list, tuple)):
        if isinstance(now, (list, tuple)) and len(was) == len(order):
            for slot, place in zip(was, order, strict=True):
                yield from _pairs(slot, None if place is None else now[place], order)
    elif isinstance(was, dict):
        if isinstance(now, dict):
            for key, slot in was.items():
                yield from _pairs(slot, now.get(key), order)
    elif hasattr(was, "assign") and was is not now:
        yield was, now if hasattr(now, "assign") else None


def _within(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _within(item)
    else:
        yield value
