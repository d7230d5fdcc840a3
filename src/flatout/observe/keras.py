"""Hooks for Keras on torch, whose optimizers are not torch's."""

from __future__ import annotations

from typing import Any

from flatout.hooks import wrap
from flatout.observe.optimizers import StepFinder


def watch_keras(module: Any, steps: StepFinder) -> None:
    """Hook into keras.src.optimizers.base_optimizer."""

    def around(original: Any) -> Any:
        def apply(self: Any, *args: Any, **kwargs: Any) -> Any:
            steps.begin(self)
            result = original(self, *args, **kwargs)
            steps.end(self)
            return result

        return apply

    wrap(module.BaseOptimizer, "apply", "observe", around)
