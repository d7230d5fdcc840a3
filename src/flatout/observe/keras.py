"""Keras on torch: its optimisers are none of torch's."""

from __future__ import annotations

from functools import wraps
from threading import get_ident
from typing import Any

from flatout.observe.optimizers import Steps
from flatout.observe.watch import Watch


def watch_keras(module: Any, watch: Watch, steps: Steps) -> None:
    """Hooks into keras.src.optimizers.base_optimizer."""
    lanes, owner = watch.lanes, module.BaseOptimizer
    original = owner.apply

    @wraps(original)
    def apply(self: Any, *args: Any, **kwargs: Any) -> Any:
        if get_ident() != lanes.thread:
            return original(self, *args, **kwargs)
        steps.begin()
        result = original(self, *args, **kwargs)
        steps.end(self)
        return result

    owner.apply = apply
