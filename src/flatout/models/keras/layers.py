"""Access to Keras layers, which are torch modules but run by `call`, without torch's hooks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def is_layer(part: Any) -> bool:
    """Return whether a part of a model is a Keras layer or model."""
    return hasattr(part, "_flatten_layers")


def has_layers(layer: Any) -> bool:
    return next(iter(layer._flatten_layers(include_self=False)), None) is not None


def modules_of(model: Any) -> list[Any]:
    """Return all modules of a model, each once, including layers in Keras' own lists."""
    result: dict[int, Any] = {}
    waiting = [model]
    while waiting:
        module = waiting.pop()
        if id(module) in result:
            continue
        result[id(module)] = module
        waiting.extend(module.children())
        if is_layer(module):
            waiting.extend(module._flatten_layers(include_self=False, recursive=False))
    return list(result.values())


def two_mode_layers(model: Any) -> list[str]:
    """Return the classes of layers with a training mode: dropout, batch normalization."""
    kinds = [type(module).__name__ for module in modules_of(model)]
    return [kind for kind in kinds if "Dropout" in kind or "BatchNorm" in kind]


def replace_call(layer: Any, call: Callable[..., Any]) -> Callable[[], None]:
    """Set a layer's `call`, and return a function that undoes it."""
    # This bypasses Keras' own __setattr__, which would track the function as a part of the layer.
    before = vars(layer).get("call")
    vars(layer)["call"] = call

    def undo() -> None:
        if before is None:
            vars(layer).pop("call", None)
        else:
            vars(layer)["call"] = before

    return undo
