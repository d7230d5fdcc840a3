"""Detects Keras models that only wrap the real model, as `multi_gpu_model` returns them."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

# Class names of Keras models that may hold another model.
_MODELS = ("Functional", "Model", "Sequential")


def held_in_config(config: dict[str, Any]) -> dict[str, Any] | None:
    """Return the layer that is the real model, or None.

    All other layers must only slice batches or join results.
    """
    with suppress(KeyError, TypeError, IndexError, AttributeError):
        if config["class_name"] not in _MODELS[:2]:
            return None
        layers = config["config"]["layers"]
        inner = [layer for layer in layers if layer["class_name"] in _MODELS]
        others = [layer for layer in layers if layer["class_name"] not in _MODELS]
        if len(inner) == 1 and all(map(_only_slices_or_joins, others)):
            return inner[0] if inner[0]["config"]["layers"] else None
    return None


def _only_slices_or_joins(layer: dict[str, Any]) -> bool:
    kind, config = layer["class_name"], layer["config"]
    if kind == "Lambda":  # a Lambda of multi_gpu_model returns slice i of the batch
        return set(config.get("arguments") or ()) == {"i", "parts"}
    return bool(kind == "InputLayer" or (kind == "Concatenate" and config["axis"] == 0))


def held_in_weights(file: Any) -> Any | None:
    """Return the group of the real model in an open .weights.h5 file, or None.

    All other groups must have no weights. In the file, a layer is named by its class and a count.
    """
    layers = file.get("layers", {})
    inner = [name for name in layers if "layers" in layers[name]]
    others = [name for name in layers if name not in inner]
    kinds = {name.rstrip("0123456789_") for name in others}
    if len(inner) != 1 or "lambda" not in kinds or kinds - {"input_layer", "lambda", "concatenate"}:
        return None
    has_weights = any(len(layers[name].get("vars", ())) for name in others)
    return None if has_weights else layers[inner[0]]
