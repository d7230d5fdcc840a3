"""Models of Keras that only hold the real one: what multi_gpu_model put around it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

_MODELS = ("Functional", "Model", "Sequential")


def held_in_config(config: dict[str, Any]) -> dict[str, Any] | None:
    """Find the model that this one only holds, slicing batches for it and joining its results."""
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
    if kind == "Lambda":  # multi_gpu_model cuts part i out of the batch
        return set(config.get("arguments") or ()) == {"i", "parts"}
    return bool(kind == "InputLayer" or (kind == "Concatenate" and config["axis"] == 0))


def held_in_weights(group: Any) -> str | None:
    """Name the layer in a .weights.h5 that holds the real model, if others only slice or join.

    Layers have the names of their classes there, counted.
    """
    if "layers" not in group or "vars" not in group:
        return None
    layers = group["layers"]
    inner = [name for name in layers if "layers" in layers[name]]
    others = [name for name in layers if name not in inner]
    allowed = ("input_layer", "lambda", "concatenate")
    if len(inner) != 1 or any(name.rstrip("0123456789_") not in allowed for name in others):
        return None
    if "lambda" not in others:
        return None
    return inner[0] if not any(True for name in others for _ in arrays_in(layers[name])) else None


def arrays_in(group: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """List each array below a group, with its path."""
    for name in group:
        below = f"{path}/{name}".lstrip("/")
        if hasattr(group[name], "shape"):
            yield below, group[name]
        else:
            yield from arrays_in(group[name], below)
