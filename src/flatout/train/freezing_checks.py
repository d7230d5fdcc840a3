"""What goes wrong in silence where a model is frozen in part, said before the first step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from flatout.optim import KerasOptimizer

_NAMED = 3


def freezing_lines(model: nn.Module, optimizer: Any) -> Iterator[str]:
    """A line on BatchNorm layers that are frozen in part, and one on parameters left out."""
    norms = [name for name, part in model.named_modules() if _moves_though_frozen(part)]
    if norms:
        yield (
            f"frozen BatchNorm goes on to move its statistics in training: {_listed(norms)}; "
            "flatout.freeze(model, layers=...) keeps it in evaluation"
        )
    if not isinstance(optimizer, torch.optim.Optimizer) or isinstance(optimizer, KerasOptimizer):
        return
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    missing = [n for n, p in model.named_parameters() if p.requires_grad and id(p) not in held]
    if missing:
        yield (
            f"the optimizer misses parameters that require gradients: {_listed(missing)}; they "
            "stay as they are: give them to it, or freeze them with flatout.freeze"
        )


def _moves_though_frozen(part: nn.Module) -> bool:
    """Whether a BatchNorm layer has parameters, none of them trains, and its statistics move."""
    if not isinstance(part, _NormBase) or not part.training or part.running_mean is None:
        return False
    own = list(part.parameters(recurse=False))
    trains = any(p.requires_grad for p in own)
    return len(own) > 0 and not trains and part.momentum != 0


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")
