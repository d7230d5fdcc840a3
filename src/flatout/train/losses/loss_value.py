"""The loss of one batch that `compute` returns: a mean over its samples, or (sum, weight)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch

from flatout.data import Batch
from flatout.train.losses.losses import Value

Compute = Callable[[Batch], Value]
"""Forward and loss of one batch."""
# Smallest divisor: the inverse of a smaller divisor would not be finite in float32.
_TINY = 1e-12


class Weighing(ABC):
    """A `Compute` of several losses, each of which divides by its own weight."""

    @abstractmethod
    def sums_of_weights(self, batches: Sequence[Batch]) -> torch.Tensor:
        """Return the values to be summed over all ranks before the first part of a step."""

    @abstractmethod
    def of_step(self, sums: torch.Tensor) -> AbstractContextManager[None]:
        """Within this context, treat batches as parts of a step with these sums."""


def mean_of_value(value: Value, size: int) -> tuple[torch.Tensor, torch.Tensor | float]:
    """Return a loss as (mean, weight)."""
    if not isinstance(value, tuple):
        return value, size
    total, weight = value
    if torch.is_tensor(weight):
        weight = weight.detach()
    return total / not_zero(weight, total.dtype), weight


def sum_of_value(value: Value, size: int) -> tuple[torch.Tensor, torch.Tensor | float]:
    """Return a loss as (sum, weight)."""
    if isinstance(value, tuple):
        total, weight = value
        return total, weight.detach() if torch.is_tensor(weight) else weight
    return value * size, size


def not_zero(weight: torch.Tensor | float, dtype: torch.dtype) -> torch.Tensor | float:
    """Return a nonzero divisor: if nothing counts, loss and gradient are zero, not 0/0."""
    return weight.to(dtype).clamp_min(_TINY) if torch.is_tensor(weight) else max(weight, _TINY)
