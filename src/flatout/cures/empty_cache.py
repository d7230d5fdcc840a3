"""script.empty_cache=skip: the device's allocator keeps its memory from step to step."""

from __future__ import annotations

from threading import get_ident
from typing import Any

from flatout.cures.record import is_on, took
from flatout.cures.steps import ScriptSteps, caller
from flatout.hooks import wrap

FIELD = "script.empty_cache"


def skip_empty_cache(torch: Any, steps: ScriptSteps) -> None:
    """Make calls of torch.cuda.empty_cache that come in each step do nothing."""
    for module in (torch.cuda, torch.cuda.memory):
        wrap(module, "empty_cache", "cures", _skipped, steps)


def _skipped(original: Any, steps: ScriptSteps) -> Any:
    def empty_cache() -> None:
        if get_ident() == steps.thread and is_on() and steps.is_in_each(caller()):
            took(FIELD, "the device's memory is kept")
            return
        original()

    return empty_cache
