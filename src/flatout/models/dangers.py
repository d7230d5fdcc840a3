"""Parts of a model that change although they seem frozen, and parts that seem to train but do not.

Imports nothing, because it observes scripts before they have imported anything.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any


def moving_norms(model: Any) -> list[str]:
    """Return the names of BatchNorms whose weights are frozen, but whose statistics still change.

    They are in training mode, so that each batch updates their running statistics.
    """
    return [name for name, part in model.named_modules() if _moves(part)]


def _moves(part: Any) -> bool:
    if not part.training or getattr(part, "running_mean", None) is None:
        return False
    own = list(part.parameters(recurse=False))
    trains = any(tensor.requires_grad for tensor in own)
    return bool(own) and not trains and getattr(part, "momentum", None) != 0


def not_stepped(model: Any, stepped: Collection[int]) -> list[str]:
    """Return the names of parameters that require gradients, but are in no optimizer.

    Args:
        model: a torch module.
        stepped: the `id` of each tensor that an optimizer steps.
    """
    return [
        name
        for name, tensor in model.named_parameters()
        if tensor.requires_grad and id(tensor) not in stepped
    ]
