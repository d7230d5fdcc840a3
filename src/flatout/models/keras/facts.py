"""The facts that identify a job of a compiled Keras model: its layers, losses and metrics."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

from flatout.data import arguments_of, arguments_words, code_digest, digest_of, is_library, words_of

# Entries of a layer's configuration that its facts leave out. Names contain a count of all layers
# that the process has made, and the other entries only concern the initial weights.
_UNTOLD = ("name", "seed", "build_config", "registered_name", "layers", "dtype")


def layer_lines(model: Any, parts: Iterable[Any] | None = None) -> dict[str, str]:
    own = None if parts is None else set(map(id, parts))
    layers = [layer for layer in model._flatten_layers() if own is None or id(layer) in own]
    numbers = {layer.name: f"layer {number}" for number, layer in enumerate(layers)}
    return {numbers[layer.name]: _layer_words(layer, numbers) for layer in layers}


def compiled_facts(model: Any) -> dict[str, list[str]]:
    """Return the loss and metrics that a model was compiled with."""
    compiled = model._compile_config.config
    return {
        "loss": _named(compiled.get("loss")),
        "loss_weights": [json.dumps(compiled.get("loss_weights"), default=words_of), ""],
        "metrics": _named([compiled.get("metrics"), compiled.get("weighted_metrics")]),
    }


def keras_callback_facts(callbacks: Iterable[Any]) -> dict[str, list[str]]:
    """Return the classes of Keras' callbacks, with the arguments of each callback."""
    kinds = [
        f"{type(callback).__qualname__}({arguments_words(callback)})"
        for callback in callbacks
        if type(callback).__qualname__ != "History"  # every fit has this callback
    ]
    return {"Keras callbacks": [", ".join(kinds) or "none", ""]}


def _named(given: Any) -> list[str]:
    return [_words(given), digest_of(_digests(given))]


def _words(given: Any) -> str:
    if given is None or isinstance(given, str):
        return str(given or "none")
    if isinstance(given, Mapping):
        return ", ".join(f"{name}: {_words(value)}" for name, value in given.items())
    if isinstance(given, (list, tuple)):
        return ", ".join(_words(item) for item in given if item is not None) or "none"
    return words_of(given)


def _digests(given: Any) -> str:
    if isinstance(given, Mapping):
        return ";".join(f"{name}: {_digests(value)}" for name, value in given.items())
    if isinstance(given, (list, tuple)):
        return ";".join(map(_digests, given))
    if not hasattr(given, "get_config"):
        return code_digest(given)
    config = {}
    with suppress(Exception):  # a user's class may have no configuration
        config = given.get_config()
    made = {name: value for name, value in arguments_of(given).items() if name not in _UNTOLD}
    code = code_digest((type(given), made))
    return f"{code} {json.dumps(_plain(config, {}), sort_keys=True)}"


def _layer_words(layer: Any, numbers: dict[str, str]) -> str:
    words = type(layer).__qualname__
    try:
        config = layer.get_config()
    except Exception:  # a user's class need not have a configuration
        config = arguments_of(layer)
    nodes = [
        item.get("inbound_nodes") for item in config.get("layers", ()) if isinstance(item, dict)
    ]
    if any(nodes):  # the connections of the layers
        words += f" graph {digest_of(json.dumps(_plain(nodes, numbers), sort_keys=True))[:8]}"
    options = {k: v for k, v in _plain(config, numbers).items() if not k.endswith("_initializer")}
    words += f"({', '.join(f'{name}={_short(value)}' for name, value in options.items())})"
    return words if is_library(type(layer)) else f"{words} code {code_digest(layer)[:8]}"


def _plain(value: Any, numbers: Mapping[str, str]) -> Any:
    if isinstance(value, Mapping):
        return {str(k): _plain(v, numbers) for k, v in value.items() if k not in _UNTOLD}
    if isinstance(value, (list, tuple)):
        return [_plain(item, numbers) for item in value]
    if isinstance(value, str):
        return numbers.get(value, value)
    return value if isinstance(value, (bool, int, float, type(None))) else words_of(value)


def _short(value: Any) -> str:
    return str(value.get("class_name", value)) if isinstance(value, dict) else str(value)
