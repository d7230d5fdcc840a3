"""Collectives that the script calls itself: their number and size, timed in the sync lane."""

from __future__ import annotations

from functools import partial
from typing import Any

from flatout.observe.frequent_calls import FrequentCalls
from flatout.observe.lanes import BACKWARD, OPTIMIZER, SAVING, SYNC
from flatout.observe.timed_calls import timed
from flatout.observe.watch import Watch

KIND = "collective"
_NAMES = ("all_reduce", "reduce", "broadcast", "all_gather", "barrier")
# Lanes in which collectives are not counted: wrappers of models and optimizers call them there.
_OTHERS = (BACKWARD, OPTIMIZER, SAVING, SYNC)


def watch_collectives(torch: Any, watch: Watch) -> None:
    """Hook into the collectives of torch.distributed, in all steps or in some."""
    if not torch.distributed.is_available():
        return
    often = FrequentCalls(watch, SYNC)
    for name in _NAMES:
        around = partial(
            timed,
            kind=KIND,
            lane=SYNC,
            watch=watch,
            detail={"name": name},
            not_in=_OTHERS,
            shifted=often.shifted,
            size_of=_bytes,
        )
        often.time(torch.distributed, name, KIND, around)
    # torch.compile recognizes collectives by the function object, so the hooks must be removed.
    watch.quick.on_end.append(often.remove)


def _bytes(arguments: list[Any]) -> int:
    return next((int(item.nbytes) for item in arguments if hasattr(item, "nbytes")), 0)
