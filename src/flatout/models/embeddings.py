"""Embedding tables of torch or Keras: their weights, and whether a batch reads only some rows."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from typing import Any

import torch
from torch import nn

from flatout.errors import ModelError
from flatout.models.adapter import adapter_of
from flatout.models.keras import tables

_KINDS = (nn.Embedding, nn.EmbeddingBag)


def table_weight(table: Any) -> torch.Tensor:
    """Return the weights of a table, of shape (rows, width).

    Args:
        table: a module from `TorchModel.tables`.

    Raises:
        ModelError: the table is not built yet, or its weights are not a parameter of the table
            itself.
    """
    try:
        result = table.weight if isinstance(table, _KINDS) else tables.weight_of(table)
    except AttributeError as error:
        raise ModelError(
            f"the table {type(table).__name__} has no weights yet",
            do="build the model first, as by keras.Input or model.build(shape)",
        ) from error
    if not isinstance(result, nn.Parameter) or result.dim() != 2:
        raise ModelError(f"the weights of the table {type(table).__name__} are no parameter")
    return result


def set_table_rows(table: Any) -> None:
    """Update a module's number of rows to that of its weights."""
    rows = len(table_weight(table))
    if isinstance(table, _KINDS):
        table.num_embeddings = rows
    else:
        tables.set_rows(table, rows)


def row_tables(model: nn.Module, *, split: bool = False) -> tuple[list[nn.Module], dict[str, str]]:
    """Return the modules whose tables may be read only by rows, and the reasons for all others.

    A parameter of several modules is left out, because its readers are not known. If a forward that
    is not torch's own reads all of a table, the gradient of the table shows that.

    Args:
        model: a model of torch or Keras.
        split: whether to include bfloat16 tables, whose lower halves are stored elsewhere.
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
        if not why and is_hooked(table_weight(module)):
            why = "a hook reads its gradient"
        if why:
            others[name] = why
        else:
            result.append(module)
    return result, others


def look_at_ids(model: nn.Module, names: Container[str]) -> list[Callable[[], None]]:
    """Raise IndexError when tables of these names get ids without a row.

    torch's own tables raise by themselves.

    Returns:
        functions that end the checks.
    """
    named = [module for name, module, _ in adapter_of(model).tables() if name in names]
    return [tables.look_at_ids(module) for module in named if not isinstance(module, _KINDS)]


def has_hooks_of_others(*hooks: Mapping[int, Any] | None) -> bool:
    """Return whether torch's dictionaries of hooks have a hook that is not Flatout's."""
    every = [getattr(hook, "func", hook) for of_kind in hooks for hook in (of_kind or {}).values()]
    return not all(str(getattr(hook, "__module__", "")).startswith("flatout.") for hook in every)


def is_hooked(weight: torch.Tensor) -> bool:
    """Return whether other code's hook reads a weight's gradient and so needs all its rows."""
    after = getattr(weight, "_post_accumulate_grad_hooks", None)
    return has_hooks_of_others(weight._backward_hooks, after)


def _why_not(module: nn.Module, readers: dict[int, list[str]], split: bool) -> str:
    weight = module._parameters.get("weight")
    if weight is None:
        return "its weight is no parameter of its own"
    if type(weight) is not nn.Parameter:
        return f"its weight is a {type(weight).__name__}"
    if not weight.requires_grad:
        return "it is frozen"
    if module.sparse:
        return "its gradients are sparse already"
    if module.max_norm is not None:
        return "max_norm changes rows where they are read"
    if weight.is_cuda:
        return "on a GPU a dense step is faster"
    is_placed = weight.is_cpu and weight.is_contiguous()
    if weight.dtype is torch.bfloat16 and is_placed and not split:
        return "bf16 rounds each of its steps; compute.bf16_tables=split steps it by rows"
    if weight.dtype not in (torch.float32, torch.bfloat16) or not is_placed:
        return "it is not float32 or bfloat16 on a CPU"
    if id(weight) in readers:
        return f"{readers[id(weight)][0]} reads all of it"
    return ""
