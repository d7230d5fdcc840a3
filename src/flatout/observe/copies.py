"""Calls of copy.deepcopy, with their time."""

from __future__ import annotations

import copy
from threading import get_ident
from time import perf_counter_ns
from typing import Any

from flatout.hooks import wrap
from flatout.observe.watch import Watch


def watch_copies(watch: Watch) -> None:
    """Hook into copy.deepcopy; to be called before the script imports that function."""
    wrap(copy, "deepcopy", "observe", _timed, watch)


def _timed(original: Any, watch: Watch) -> Any:
    lanes, note = watch.lanes, watch.calls.note
    is_inside = False

    def deepcopy(*args: Any, **kwargs: Any) -> Any:
        nonlocal is_inside
        # Nested calls, as for each tensor of a model, are not counted.
        if is_inside or not lanes.steps or get_ident() != lanes.thread:
            return original(*args, **kwargs)
        is_inside = True
        began = perf_counter_ns()
        try:
            return original(*args, **kwargs)
        finally:
            is_inside = False
            note("deepcopy", perf_counter_ns() - began)

    return deepcopy
