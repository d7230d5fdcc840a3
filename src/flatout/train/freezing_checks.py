"""What goes wrong in silence where a model is frozen in part, said before the first step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from flatout.models import moving_norms
from flatout.optim import optimizer_adapter

_NAMED = 3


def freezing_lines(model: nn.Module, optimizer: Any) -> Iterator[str]:
    """A line on BatchNorm layers that are frozen in part, and one on parameters left out."""
    if norms := moving_norms(model):
        yield (
            f"frozen BatchNorm goes on to move its statistics in training: {listed(norms)}; "
            "flatout.freeze(model, layers=...) keeps it in evaluation"
        )
    if not isinstance(optimizer, torch.optim.Optimizer):
        return
    if missing := optimizer_adapter(optimizer).missed(model):
        yield (
            f"the optimizer misses parameters that require gradients: {listed(missing)}; they "
            "stay as they are: give them to it, or freeze them with flatout.freeze"
        )


def listed(names: Sequence[str]) -> str:
    """The first few names, and how many more there are."""
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")
