"""The forward of a model as one graph, traced on fake tensors.

The graph's inputs are the model's parameters and buffers, which it only reads, and the tensors of a
call. Later changes of weights therefore take effect.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Set
from itertools import zip_longest
from typing import Any
from weakref import ReferenceType

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from flatout.train.graphs.capture_graph import (
    PLAIN_TYPES,
    Graph,
    Tensors,
    Unfit,
    check_model,
    code_of,
    shapes_of,
)
from flatout.train.graphs.capture_ids import Bounded

# Limits of the comparison. _DEEP: maximum number of levels of nested objects. _LONG: maximum number
# of items in a container.
_DEEP, _LONG = 3, 1000


def held_by(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters and buffers that a forward reads, in the order of graph inputs."""
    named = (*model.named_parameters(), *model.named_buffers())
    return {name: tensor.detach() for name, tensor in named}


def trace_forward(model: nn.Module, leaves: list[Any], spec: Any) -> Graph:
    """Trace the forward of calls like this one, without changing anything."""
    check_model(model)
    held = held_by(model)
    strays: Tensors = []
    # The returned values, with an ellipsis in place of each tensor; and their tree structure.
    template: list[Any] = []

    def forward(*flat: torch.Tensor) -> Tensors:
        tensors = dict(zip(held, flat, strict=False))
        left = iter(flat[len(held) :])
        parts = [next(left) if torch.is_tensor(leaf) else leaf for leaf in leaves]
        args, kwargs = tree_unflatten(parts, spec)
        before = [tensor._version for tensor in flat]
        with Bounded() as bounded:
            output = torch.func.functional_call(model, tensors, args, kwargs)
        if [tensor._version for tensor in flat] != before:
            raise Unfit("forward changes a weight, a buffer or its input")
        behind, made = tree_flatten(output)
        odd = [part for part in behind if not isinstance(part, (torch.Tensor, *PLAIN_TYPES))]
        if odd:
            raise Unfit(f"forward returns a {type(odd[0]).__name__}")
        template[:] = [[... if torch.is_tensor(part) else part for part in behind], made]
        strays[:] = bounded.strays
        result = [torch.stack(strays).any()] if strays else []
        return [*result, *(part for part in behind if torch.is_tensor(part))]

    arguments = [*held.values(), *(leaf for leaf in leaves if torch.is_tensor(leaf))]
    code, constants = code_of(forward, arguments, [])
    behind, made = template
    return Graph(code, constants, shapes_of(arguments), bool(strays), behind, made, [])


class Attributes:
    """A record of the state that a model's modules have in addition to the values of tensors.

    It covers attributes, hooks and submodules, and the contents of containers and plain objects
    among them, such as a configuration.

    Args:
        model: the model whose modules are recorded.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        # Holds the objects themselves, so that no new object can get the same id.
        self._known = list(self._now())

    def hold(self) -> bool:
        """Return whether the state is unchanged."""
        return all(
            a is b or (type(a) is type(b) and isinstance(a, PLAIN_TYPES) and a == b)
            for a, b in zip_longest(self._known, self._now(), fillvalue=...)
        )

    def _now(self) -> Iterator[Any]:
        for module in self._model.modules():
            for name, value in vars(module).items():
                if name != "_compiled_call_impl":
                    yield name
                    yield from _inside(value, _DEEP)


def _inside(value: Any, deep: int) -> Iterator[Any]:
    if isinstance(value, ReferenceType):  # recurrent layers hold weak references to weights
        value = value()
    tensors: list[Any] = []
    is_container = isinstance(value, (Mapping, list, tuple, deque, Set))
    if is_container:
        tensors = [*value, *value.values()] if isinstance(value, Mapping) else list(value)
    elif not isinstance(value, (torch.Tensor, nn.Module, type, *PLAIN_TYPES)):
        own = getattr(value, "__dict__", {})
        tensors = [*own, *own.values()]
    if not deep or len(tensors) > _LONG:
        yield from (value, len(tensors))
        return
    yield type(value) if is_container else value
    for item in tensors:
        yield from _inside(item, deep - 1)
