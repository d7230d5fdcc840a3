"""One optimizer or several, as a user gives them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]


def as_tuple(optimizers: Optimizers) -> tuple[torch.optim.Optimizer, ...]:
    """Them in their order."""
    if isinstance(optimizers, torch.optim.Optimizer):
        return (optimizers,)
    return tuple(optimizers)
