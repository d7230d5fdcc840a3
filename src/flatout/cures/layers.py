"""Identity of a module's layers: their tensors and their computation."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from flatout.data import code_digest, is_library


def tensors_of(part: Any) -> dict[str, Any]:
    """Return a module's parameters, buffers, and tensors that are plain attributes, by name."""
    import torch

    tensors = {**dict(part.named_parameters()), **dict(part.named_buffers())}
    for path, inner in part.named_modules():
        for name, value in vars(inner).items():
            if isinstance(value, torch.Tensor):
                tensors[f"{path}.{name}"] = value
    return tensors


def layers_of(part: Any) -> dict[str, list[str]]:
    """Return code, attributes and hooks, which with the tensors define a module's computation."""
    layers = {}
    for path, inner in part.named_modules():
        # The root's own forward and hooks are left out: they are Flatout's, or do not change.
        layers[path] = words_of(inner, () if inner is not part else ("forward",))
        if inner is not part:
            hooks = [*inner._forward_pre_hooks.values(), *inner._forward_hooks.values()]
            layers[path].append(code_digest(hooks))
    return layers


def words_of(layer: Any, without: Collection[str] = ()) -> list[str]:
    """Return a layer's class, code and attributes, which with its tensors define its computation.

    Args:
        layer: a module.
        without: names of attributes to leave out.
    """
    from torch import nn

    kind, common = type(layer), {*vars(nn.Module()), *without}
    own = {name: value for name, value in vars(layer).items() if name not in common}
    words = [f"{kind.__module__}.{kind.__qualname__}", repr(getattr(layer, "code", ""))]
    words += [] if is_library(kind) else [code_digest(kind)]
    return [*words, code_digest(own)]
