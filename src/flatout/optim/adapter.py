"""Selection of the adapter for an optimizer's framework."""

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
    """Return the adapter of the optimizer's framework."""
    if isinstance(optimizer, KerasOptimizer):
        return optimizer
    return TorchOptimizer(optimizer)


def name_of(optimizer: torch.optim.Optimizer) -> str:
    """Return the class name of an optimizer as the user knows it."""
    return type(optimizer_adapter(optimizer).given).__name__


def why_dense(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> str:
    """Return the reason why a group of an optimizer cannot step single rows, or ""."""
    why = optimizer_adapter(optimizer).why_all_rows(group)
    return why or ("" if table_rows.available() else "the C extension is absent")


def rules_of(
    optimizer: torch.optim.Optimizer, weights: Iterable[nn.Parameter]
) -> Iterator[tuple[nn.Parameter, RowRule]]:
    """Yield tables with the rules by which an optimizer steps them (see `why_dense`)."""
    groups = {p: group for group in optimizer.param_groups for p in group["params"]}
    adapter = optimizer_adapter(optimizer)
    for weight in weights:
        yield weight, adapter.row_rule(groups[weight], weight)
