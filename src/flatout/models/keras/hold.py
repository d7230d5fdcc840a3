"""Keras layers that neither train nor act as in training.

Keras' `trainable=False` keeps BatchNormalization in inference, but dropout still acts. So layers
that draw random numbers get a `call` with training=False. Augmentation, such as RandomFlip, remains
active: it is part of the data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import wraps
from typing import Any

_HELD = "_flatout_held"


def hold(layer: Any) -> None:
    """Set a layer and all layers inside it to neither train nor act as in training."""
    layer.trainable = False
    for part in layer._flatten_layers():
        if _acts(part) and not _is_held(part):
            vars(part)["call"] = _without_training(part.call)


def release(model: Any, chosen: Iterable[Any], *, batch_norm: bool) -> None:
    chosen = list(chosen)
    # From the outermost inward, because a layer passes its own flag to the layers inside.
    for layer, trains in _trains_then(model, chosen, batch_norm=batch_norm):
        if layer.trainable != trains:
            layer.trainable = trains
    for part in (part for layer in chosen for part in layer._flatten_layers()):
        if _is_held(part):
            del vars(part)["call"]


def frozen(model: Any, chosen: Iterable[Any], *, batch_norm: bool) -> list[Any]:
    """Return the variables that `release` lets train, in the model's order."""
    layers = _trains_then(model, chosen, batch_norm=batch_norm)
    own = (v for layer, trains in layers if trains for v in layer._trainable_variables)
    result = {id(variable) for variable in own if not variable.trainable}
    return [variable for variable in model.weights if id(variable) in result]


def _trains_then(model: Any, chosen: Iterable[Any], *, batch_norm: bool) -> list[tuple[Any, bool]]:
    parts = {id(part) for layer in chosen for part in layer._flatten_layers()}
    wanted = []
    for layer in model._flatten_layers():
        holds_one = any(id(part) in parts for part in layer._flatten_layers(include_self=False))
        trains = holds_one or (id(layer) in parts and (batch_norm or not keeps_statistics(layer)))
        wanted.append((layer, trains or layer.trainable))
    return wanted


def keeps_statistics(layer: Any) -> bool:
    """Return whether a layer normalizes by statistics that it updates in training."""
    return type(layer).__name__ == "BatchNormalization"


def before(model: Any, last: Any) -> Iterator[Any]:
    """Yield all layers up to `last`: those in its graph, or without a graph in listed order."""
    if last is model:
        yield model
        return
    layers = list(model._flatten_layers(include_self=False, recursive=False))
    holder = next(
        layer for layer in layers if any(part is last for part in layer._flatten_layers())
    )
    graph = getattr(model, "_functional", None) or model
    if hasattr(holder, "_inbound_nodes") and hasattr(graph, "operations"):
        yield from _flow_into(holder, {id(operation) for operation in graph.operations})
    else:
        yield from layers[: layers.index(holder)]
    yield from before(holder, last)


def _flow_into(layer: Any, known: set[int]) -> Iterator[Any]:
    waiting, met = [layer], {id(layer)}
    while waiting:
        nodes = [parent for node in waiting.pop()._inbound_nodes for parent in node.parent_nodes]
        for operation in (node.operation for node in nodes):
            if id(operation) in known and id(operation) not in met:
                met.add(id(operation))
                waiting.append(operation)
                if hasattr(operation, "trainable"):
                    yield operation


def _acts(layer: Any) -> bool:
    cell = getattr(layer, "cell", None)  # a recurrent layer draws with its cell's generator
    draws = layer._seed_generators or getattr(cell, "_seed_generators", None)
    return bool(draws) and ".preprocessing." not in type(layer).__module__


def _without_training(call: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(call)
    def held(*inputs: Any, **options: Any) -> Any:
        if "training" in options:
            options["training"] = False
        return call(*inputs, **options)

    setattr(held, _HELD, True)
    return held


def _is_held(layer: Any) -> bool:
    return hasattr(vars(layer).get("call"), _HELD)
