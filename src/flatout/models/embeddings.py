"""Tables of embeddings that a batch reads by rows alone."""

from __future__ import annotations

from collections.abc import Callable, Container

import torch
from torch import nn

from flatout.models.adapter import adapter_of
from flatout.models.keras import tables

_KINDS = (nn.Embedding, nn.EmbeddingBag)


def row_tables(model: nn.Module, *, split: bool = False) -> tuple[list[nn.Module], dict[str, str]]:
    """Modules whose tables are read by rows alone, and why others are not, by name.

    What a forward that is not torch's own does with a table is not known, nor who else reads a
    parameter that several modules have.

    Args:
        model: of torch or Keras.
        split: tables of bfloat16 too, whose lower halves lie elsewhere.
    """
    readers: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        for parameter in module._parameters.values():
            if parameter is not None and not isinstance(module, _KINDS):
                readers.setdefault(id(parameter), []).append(name or type(module).__name__)
    result: list[nn.Module] = []
    others: dict[str, str] = {}
    for name, module, _ in adapter_of(model).tables():
        is_torch = isinstance(module, _KINDS)
        why = _why_not(module, readers, split) if is_torch else tables.why_whole(module, model)
        if why:
            others[name] = why
        else:
            result.append(module)
    return result, others


def look_at_ids(model: nn.Module, names: Container[str]) -> list[Callable[[], None]]:
    """Raise IndexError where tables of these names are given ids that they have no rows for.

    torch's own raise by themselves.

    Returns:
        what ends that.
    """
    named = [module for name, module, _ in adapter_of(model).tables() if name in names]
    return [tables.look_at_ids(module) for module in named if not isinstance(module, _KINDS)]


def _why_not(module: nn.Module, readers: dict[int, list[str]], split: bool) -> str:
    weight = module._parameters.get("weight")
    own = (nn.Embedding.forward, nn.EmbeddingBag.forward)
    if weight is None or type(module).forward not in own or "forward" in vars(module):
        return "its weight or its forward is not torch's own"
    if type(weight) is not nn.Parameter:
        return f"its weight is a {type(weight).__name__}"
    if not weight.requires_grad:
        return "it is frozen"
    if module.sparse:
        return "its gradients are sparse already"
    if module.max_norm is not None:
        return "max_norm changes rows where they are read"
    is_placed = weight.device.type in ("cpu", "cuda") and weight.is_contiguous()
    if weight.dtype is torch.bfloat16 and is_placed and not split:
        return "bf16 rounds each of its steps; compute.bf16_tables=split steps it by rows"
    if weight.dtype not in (torch.float32, torch.bfloat16) or not is_placed:
        return "it is not float32 or bfloat16 on a CPU or GPU"
    if id(weight) in readers:
        return f"{readers[id(weight)][0]} reads all of it"
    return ""
