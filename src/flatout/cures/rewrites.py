"""compute.rewrites: applies the rewrites of flatout.models to a script's own model."""

from __future__ import annotations

from typing import Any

from flatout.cures.record import leave, took
from flatout.cures.roots import Call, Cure
from flatout.cures.steps import ScriptSteps
from flatout.observe import unwrapped

FIELD = "compute.rewrites"


def cure(torch: Any, steps: ScriptSteps) -> Cure:
    """Return the wrapper for calls of root modules."""
    return rewritten


def rewritten(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], call: Call) -> Call:
    """Rewrite a root module before its first call in train mode, to which rewrites apply."""
    is_done = False

    def once_in_training(module: Any, /, *args: Any, **kwargs: Any) -> Any:
        nonlocal is_done
        if not is_done and module.training:
            is_done = True
            _rewrite(module)
        return call(module, *args, **kwargs)

    return once_in_training


def _rewrite(module: Any) -> None:
    from flatout.models import find_rewrites

    name = type(unwrapped(module)[-1]).__name__
    if any(type(outer).__name__ == "OptimizedModule" for outer in unwrapped(module)):
        leave(FIELD, f"{name} is compiled")
        return
    result = find_rewrites(unwrapped(module)[-1])
    for rewrite in result:
        rewrite.apply()
        took(FIELD, rewrite.words)
    if not result:
        leave(FIELD, f"no activation before max-pooling in {name}")
