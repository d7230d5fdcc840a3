"""Layers of Keras, which are torch modules too, but called by `call` and past torch's hooks."""

from __future__ import annotations

from typing import Any


def is_layer(part: Any) -> bool:
    """Whether a part of a model is one of Keras' layers or models."""
    return hasattr(part, "_flatten_layers")


def has_layers(layer: Any) -> bool:
    """Whether a layer has others inside it."""
    return next(iter(layer._flatten_layers(include_self=False)), None) is not None
