"""Layers of Keras, which are torch modules too, but called by `call` and past torch's hooks."""

from __future__ import annotations

from typing import Any


def is_layer(part: Any) -> bool:
    """Whether a part of a model is one of Keras' layers or models."""
    return hasattr(part, "_flatten_layers")


def has_layers(layer: Any) -> bool:
    """Whether a layer has others inside it."""
    return next(iter(layer._flatten_layers(include_self=False)), None) is not None


def modules_of(model: Any) -> list[Any]:
    """All modules of a model, each once; also the layers that Keras keeps in its own lists."""
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
    """Kinds of the layers that compute otherwise in training: dropout, normalization by batch."""
    kinds = [type(module).__name__ for module in modules_of(model)]
    return [kind for kind in kinds if "Dropout" in kind or "BatchNorm" in kind]
