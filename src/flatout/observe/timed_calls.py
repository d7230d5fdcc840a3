"""Timing of calls by the stepping thread, in a lane of their own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from threading import get_ident
from typing import Any

from flatout.observe.lanes import SAVING
from flatout.observe.watch import Watch


def timed(
    original: Any,
    kind: str,
    lane: int,
    watch: Watch,
    *,
    detail: dict[str, Any] | None = None,
    depth: int = 2,
    not_in: tuple[int, ...] = (SAVING,),
    shifted: Counter[tuple[str, int]] | None = None,
    size_of: Callable[[list[Any]], int] | None = None,
) -> Any:
    """Return a function whose calls are counted as `kind`, with their time in `lane`."""
    lanes, note = watch.lanes, watch.calls.note

    def call(*args: Any, **kwargs: Any) -> Any:
        if get_ident() != lanes.thread or lanes.current in not_in:
            return original(*args, **kwargs)
        before = lanes.switch(lane)
        began = lanes.last
        try:
            return original(*args, **kwargs)
        finally:
            lanes.switch(before)
            took = lanes.last - began
            if shifted is not None:
                shifted[kind, before] += took
            size = 0 if size_of is None else size_of([*args, *kwargs.values()])
            note(kind, took, depth, detail, size)

    return call
