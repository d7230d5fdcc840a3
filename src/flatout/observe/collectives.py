"""Collectives that the script calls itself: how many, how large, and in the lane of sync."""

from __future__ import annotations

from collections import Counter
from threading import get_ident
from typing import Any

from flatout.observe.frequent_calls import FrequentCalls
from flatout.observe.lanes import BACKWARD, OPTIMIZER, SAVING, SYNC
from flatout.observe.watch import Watch

KIND = "collective"
_NAMES = ("all_reduce", "reduce", "broadcast", "all_gather", "barrier")
# Wrappers of models and optimizers call them too.
_OTHERS = (BACKWARD, OPTIMIZER, SAVING, SYNC)
# Timing them may take so much of a step, at so much for each of them.
_MOST_NS, _CALL_NS = 5_000, 3_000


def watch_collectives(torch: Any, watch: Watch) -> None:
    """Hooks into those of torch.distributed, in all steps or in the first ones."""
    if not torch.distributed.is_available():
        return
    often = FrequentCalls(watch, _MOST_NS, _CALL_NS, SYNC)
    for name in _NAMES:
        often.time(torch.distributed, name, KIND, _timed, name, watch, often.shifted)
    # A compiled function calls them by what they are.
    watch.quick.on_end.append(often.remove)


def _timed(original: Any, name: str, watch: Watch, shifted: Counter[tuple[str, int]]) -> Any:
    lanes, calls = watch.lanes, watch.calls
    detail = {"name": name}

    def collective(*args: Any, **kwargs: Any) -> Any:
        if get_ident() != lanes.thread or lanes.current in _OTHERS:
            return original(*args, **kwargs)
        before = lanes.switch(SYNC)
        began = lanes.last
        try:
            return original(*args, **kwargs)
        finally:
            lanes.switch(before)
            took = lanes.last - began
            shifted[KIND, before] += took
            calls.note(KIND, took, 2, detail, _bytes([*args, *kwargs.values()]))

    return collective


def _bytes(arguments: list[Any]) -> int:
    """Of the first tensor."""
    return next((int(item.nbytes) for item in arguments if hasattr(item, "nbytes")), 0)
