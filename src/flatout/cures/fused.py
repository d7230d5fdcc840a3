"""compute.fused_optimizer: uses torch's fused kernel unless the script chose another one."""

from __future__ import annotations

from typing import Any

from flatout.cures.record import leave, took
from flatout.cures.steps import ScriptSteps

FIELD = "compute.fused_optimizer"


def fuse_steps(torch: Any, steps: ScriptSteps) -> None:
    """Fuse each optimizer that allows it before it steps, and again after its state was loaded."""
    refused: set[int] = set()

    def look(optimizer: Any) -> None:
        if id(optimizer) in refused:
            return
        from flatout.optim import begins_late, can_fuse, fuse, is_fused, unfuse

        name = type(optimizer).__name__
        if is_fused(optimizer):
            if begins_late(optimizer):
                unfuse(optimizer)
                refused.add(id(optimizer))
                leave(FIELD, f"parameters of {name} have their first gradients at different times")
            return
        if not can_fuse(optimizer) or begins_late(optimizer):
            refused.add(id(optimizer))
            leave(FIELD, _reason(optimizer, name))
            return
        fuse(optimizer)
        took(FIELD, f"fused {name}")

    steps.before.append(look)


def _reason(optimizer: Any, name: str) -> str:
    for option in ("fused", "foreach"):
        if any(group.get(option) is not None for group in optimizer.param_groups):
            return f"{name} was given {option}={optimizer.param_groups[0].get(option)}"
    return f"torch has no fused kernel for {name} and its parameters"
