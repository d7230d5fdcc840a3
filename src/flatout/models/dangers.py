"""What of a model learns though it seems frozen, and what does not though it seems to train.

Imports nothing, as scripts are observed with it before anything of theirs was imported.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any


def moving_norms(model: Any) -> list[str]:
    """Names of BatchNorms whose weights are frozen, though they normalize by batches and learn.

    They are in training, so that each batch moves their running statistics.
    """
    return [name for name, part in model.named_modules() if _moves(part)]


def _moves(part: Any) -> bool:
    if not part.training or getattr(part, "running_mean", None) is None:
        return False
    own = list(part.parameters(recurse=False))
    trains = any(tensor.requires_grad for tensor in own)
    return bool(own) and not trains and getattr(part, "momentum", None) != 0


def not_stepped(model: Any, stepped: Collection[int]) -> list[str]:
    """Names of parameters that train, but are in no optimizer.

    Args:
        model: a torch module.
        stepped: the `id` of each tensor that an optimizer steps.
    """
    return [
        name
        for name, tensor in model.named_parameters()
        if tensor.requires_grad and id(tensor) not in stepped
    ]
