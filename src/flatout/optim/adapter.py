"""The place where an optimizer is asked which framework made it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from flatout.kernels import table_rows
from flatout.models import KerasOptimizer
from flatout.optim.row_rules import RowRule
from flatout.optim.torch_optimizer import TorchOptimizer

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]
"""One optimizer or several, as a user gives them."""


def as_tuple(optimizers: Optimizers) -> tuple[torch.optim.Optimizer, ...]:
    """Return the optimizers in their order."""
    if isinstance(optimizers, torch.optim.Optimizer):
        return (optimizers,)
    return tuple(optimizers)


def optimizer_adapter(optimizer: torch.optim.Optimizer) -> TorchOptimizer | KerasOptimizer:
    """The optimizer with what Flatout asks of it, answered as its framework does."""
    if isinstance(optimizer, KerasOptimizer):
        return optimizer
    return TorchOptimizer(optimizer)


def name_of(optimizer: torch.optim.Optimizer) -> str:
    """What the user calls an optimizer."""
    return type(optimizer_adapter(optimizer).given).__name__


def why_dense(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> str:
    """What keeps a group of an optimizer from stepping single rows; "" where nothing does."""
    why = optimizer_adapter(optimizer).why_all_rows(group)
    return why or ("" if table_rows.available() else "the C extension is absent")


def rules_of(
    optimizer: torch.optim.Optimizer, weights: Iterable[nn.Parameter]
) -> Iterator[tuple[nn.Parameter, RowRule]]:
    """By which an optimizer steps tables, of which `why_dense` says that it can."""
    groups = {p: group for group in optimizer.param_groups for p in group["params"]}
    adapter = optimizer_adapter(optimizer)
    for weight in weights:
        yield weight, adapter.row_rule(groups[weight], weight)
