"""An agreement of ranks at a point that each of them passes, without a collective.

Ranks that ask count themselves in the job's store, and wait. Other ranks only count the points that
they have passed, and their watches report the count at each beat. The first rank that knows the
result writes the verdict to the store, where it is never overwritten. So all ranks that ask read
the same.
"""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic, sleep
from typing import Any

_ALL, _SOME = "all", "some"
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.001, 0.1


def all_ask(
    store: Any, point: int, ranks: int, is_passed: Callable[[int], bool], patience_s: float
) -> bool:
    """Ask at a point, and wait until all ranks ask, or one is known to have passed it."""
    verdict, until = f"point/{point}/verdict", monotonic() + patience_s
    if store.add(f"point/{point}/asked", 1) == ranks:
        store.compare_set(verdict, "", _ALL)
    pause = _FIRST_PAUSE_S
    while not store.check([verdict]):
        if is_passed(point) or monotonic() > until:
            store.compare_set(verdict, "", _SOME)
        else:
            sleep(pause)
            pause = min(2 * pause, _LAST_PAUSE_S)
    return bool(store.get(verdict) == _ALL.encode())
