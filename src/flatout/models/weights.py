"""A model's weights, buffers and other state by name, whatever framework made it.

A torch module's names are those of its state dict, without the levels that wrappers (DataParallel,
DistributedDataParallel, torch.compile) put around modules: the same weights have the same names,
wrapped or not. Keras numbers its layers by how many a process
has made (`dense_7`), so names from there are counted anew within the model: `dense`, `dense_1`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from flatout.models.keras_model import is_keras, variables_of

_NUMBER = re.compile(r"_\d+$")


def weights_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Everything that is saved of a model; the tensors themselves.

    Of a Keras model these are weights, statistics, seeds and states, in Keras' order.
    """
    if is_keras(model):
        return {name: variable.value.detach() for name, variable in _variables(model).items()}
    state = model.state_dict()
    own = own_names(model, state)
    return {own[name]: value for name, value in state.items()}


@torch.no_grad()
def load_weights(model: nn.Module, weights: Mapping[str, torch.Tensor]) -> None:
    """Put into the model what `weights_of` gave; names and shapes have been checked."""
    if not is_keras(model):
        own = own_names(model, model.state_dict())
        model.load_state_dict({name: weights[own[name]] for name in own})
        return
    for name, variable in _variables(model).items():
        variable.value.copy_(weights[name])


def modules_of(model: nn.Module) -> dict[str, nn.Module]:
    """Each module by its own name: of a wrapper and what it holds, the latter."""
    levels = _wrapped(model)
    return {_without(path, levels): module for path, module in model.named_modules()}


def own_names(model: nn.Module, names: Iterable[str]) -> dict[str, str]:
    """Each name of a parameter, buffer or module of `model`, without the levels of wrappers.

    Where two names would become equal, because a wrapper has state of its own, all stay as they
    are.
    """
    levels = _wrapped(model)
    own = {name: _without(name, levels) for name in names}
    return own if len(set(own.values())) == len(own) else {name: name for name in own}


def _wrapped(model: nn.Module) -> set[str]:
    """The paths of modules that a wrapper holds: "module", "net._orig_mod"."""
    # Only where something was compiled is torch's compiler imported.
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    compiled = (dynamo.OptimizedModule,) if dynamo is not None else ()
    held: set[str] = set()
    for path, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, (DataParallel, DistributedDataParallel)):
            held.add(f"{path}.module".lstrip("."))
        elif isinstance(module, compiled):
            held.add(f"{path}._orig_mod".lstrip("."))
    return held


def _without(name: str, levels: set[str]) -> str:
    parts = name.split(".")
    paths = (".".join(parts[: end + 1]) for end in range(len(parts)))
    return ".".join(part for part, path in zip(parts, paths, strict=True) if path not in levels)


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
