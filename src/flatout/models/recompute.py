"""Activation checkpointing: keep a block's inputs, compute its activations again in backward.

Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost". torch's own `checkpoint` does the
work and replays the random state. This module adds the buffers, such as BatchNorm's running
statistics: they have the values of the first forward during the second, and are not updated twice.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import pairwise
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from flatout.errors import ModelError

_LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def recompute_activations(model: nn.Module) -> Callable[[], None]:
    """Checkpoint the blocks of `model` in training, and return a function that undoes it.

    Blocks are the composite members of a `ModuleList` or `Sequential` (the layers of a transformer,
    the residual blocks of a ConvNet). A Sequential of n plain layers is cut into about sqrt(n) runs
    of layers. In a model without a `ModuleList` or `Sequential`, blocks are its composite children.
    The result is bit-identical to the plain step.

    Raises:
        ModelError: the model has no such blocks, so no memory would be saved.
    """
    places = list(_places(model, listed=False))
    places = places or [m for m in model.children() if _parts(m) and _has_code(m)]
    if not places:
        raise ModelError(
            f"activation checkpointing finds no blocks of layers in {type(model).__name__}",
            do="put its layers into nn.Sequential or its blocks into nn.ModuleList, or set "
            "Memory(activation_checkpointing='off')",
        )
    for place in places:
        forward = _in_runs if _is_flat(place) else _as_block
        place.forward = MethodType(forward(type(place).forward), place)

    def undo() -> None:
        for place in places:
            del place.forward

    return undo


def _places(module: nn.Module, listed: bool) -> Iterator[nn.Module]:
    if "forward" in vars(module) or not _has_code(module):
        return  # other code replaced it, so it stays as it is
    if _is_flat(module) or (listed and _parts(module) and not isinstance(module, _LISTS)):
        yield module
        return
    for part in module.children():
        yield from _places(part, listed=isinstance(module, _LISTS))


def _has_code(module: nn.Module) -> bool:
    forward = inspect.getattr_static(type(module), "forward")
    is_called = forward is not nn.Module.forward or isinstance(module, _LISTS)
    return isinstance(forward, FunctionType) and is_called


def _parts(module: nn.Module) -> bool:
    return next(module.children(), None) is not None


def _is_flat(module: nn.Module) -> bool:
    if type(module) is not nn.Sequential or any(_parts(layer) for layer in module):
        return False
    return len(_starts(module)) > 1


def _starts(layers: nn.Sequential) -> list[int]:
    heavy = [i for i, layer in enumerate(layers) if next(layer.parameters(), None) is not None]
    return [0, *heavy[:: max(1, math.isqrt(len(heavy)))][1:]]


def _keeps_all(module: nn.Module) -> bool:
    if not (module.training and torch.is_grad_enabled()):
        return True
    # torch's compiler would always evaluate this to true.
    is_compiling = torch.compiler.is_compiling()
    return not is_compiling and torch._C._functorch.peek_interpreter_stack() is not None


def _as_block(forward: Callable[..., Any]) -> Callable[..., Any]:
    def recomputed(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if _keeps_all(self):
            return forward(self, *args, **kwargs)
        return _checkpointed(MethodType(forward, self), [self], *args, **kwargs)

    return _looked_up_in_its_class(recomputed)


def _in_runs(forward: Callable[..., Any]) -> Callable[..., Any]:
    def recomputed(self: nn.Sequential, input: Any) -> Any:
        if _keeps_all(self):
            return forward(self, input)
        layers = list(self)
        for start, stop in pairwise([*_starts(self), len(layers)]):
            run = layers[start:stop]
            # Backward needs the last run's activations at once, so keeping them costs nothing more.
            last = stop == len(layers)
            input = _through(run, input) if last else _checkpointed(_through, run, run, input)
        return input

    return _looked_up_in_its_class(recomputed)


def _looked_up_in_its_class(function: Callable[..., Any]) -> Callable[..., Any]:
    function.__name__ = "forward"
    return function


def _through(layers: list[nn.Module], value: Any) -> Any:
    for layer in layers:
        value = layer(value)
    return value


def _checkpointed(
    function: Callable[..., Any], modules: list[nn.Module], *args: Any, **kwargs: Any
) -> Any:
    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), _BuffersAsNow(modules)

    function = partial(function, **kwargs)
    return checkpoint(function, *args, use_reentrant=False, context_fn=contexts)


class _BuffersAsNow(AbstractContextManager[None]):
    """Context in which modules have copies of the buffers' values at this object's creation."""

    def __init__(self, modules: list[nn.Module]) -> None:
        self._values = [
            (part._buffers, name, buffer.detach().clone())
            for module in modules
            for part in module.modules()
            for name, buffer in part._buffers.items()
            if buffer is not None
        ]

    def __enter__(self) -> None:
        self._kept = [(buffers, name, buffers[name]) for buffers, name, _ in self._values]
        for buffers, name, value in self._values:
            buffers[name] = value.clone()

    def __exit__(self, *_: object) -> None:
        for buffers, name, buffer in self._kept:
            buffers[name] = buffer
