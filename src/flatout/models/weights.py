"""A model's weights, buffers and other state by name, whatever framework made it.

A torch module's names are those of its state dict. Keras numbers its layers by how many a process
has made (`dense_7`), so names from there are counted anew within the model: `dense`, `dense_1`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from flatout.models.keras_model import is_keras, variables_of

_NUMBER = re.compile(r"_\d+$")


def weights_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Everything that is saved of a model; the tensors themselves.

    Of a Keras model these are weights, statistics, seeds and states, in Keras' order.
    """
    if is_keras(model):
        return {name: variable.value.detach() for name, variable in _variables(model).items()}
    return model.state_dict()


@torch.no_grad()
def load_weights(model: nn.Module, weights: Mapping[str, torch.Tensor]) -> None:
    """Put into the model what `weights_of` gave; names and shapes have been checked."""
    if not is_keras(model):
        model.load_state_dict(weights)
        return
    for name, variable in _variables(model).items():
        variable.value.copy_(weights[name])


def _variables(model: Any) -> dict[str, Any]:
    """The model's variables by counted name; metrics are of a fit, not of the model."""
    metrics = {id(v) for metric in model.metrics for v in metric.variables}
    seen: dict[str, list[str]] = {}
    named: dict[str, Any] = {}
    for variable in variables_of(model):
        if id(variable) in metrics:
            continue
        *layers, own = variable.path.split("/")
        if layers and layers[0] == model.name:
            layers = layers[1:]
        counted = [_counted(layer, depth, seen) for depth, layer in enumerate(layers)]
        name = "/".join([*counted, own])
        # A layer may hold several variables of one name.
        while name in named:
            name += "+"
        named[name] = variable
    return named


def _counted(layer: str, depth: int, seen: dict[str, list[str]]) -> str:
    base = _NUMBER.sub("", layer)
    known = seen.setdefault(f"{depth} {base}", [])
    if layer not in known:
        known.append(layer)
    number = known.index(layer)
    return f"{base}_{number}" if number else base
