"""Keras on torch: its optimizers are none of torch's."""

from __future__ import annotations

from functools import wraps
from typing import Any

from flatout.observe.optimizers import Steps


def watch_keras(module: Any, steps: Steps) -> None:
    """Hooks into keras.src.optimizers.base_optimizer."""
    owner = module.BaseOptimizer
    original = owner.apply

    @wraps(original)
    def apply(self: Any, *args: Any, **kwargs: Any) -> Any:
        steps.begin(self)
        result = original(self, *args, **kwargs)
        steps.end(self)
        return result

    owner.apply = apply
