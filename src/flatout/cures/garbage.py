"""script.garbage=scheduled: collects Python's garbage between epochs, not within steps."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from threading import get_ident
from time import monotonic
from typing import Any

from flatout.cures.record import is_on, took
from flatout.cures.steps import ScriptSteps, caller
from flatout.hooks import wrap
from flatout.measure import resident_bytes

FIELD = "script.garbage"
# Growth of memory after which garbage is collected within an epoch. _GROWTH: as a share of memory;
# _GROWTH_BYTES: in bytes.
_GROWTH, _GROWTH_BYTES = 0.25, 256 * 2**20
# Seconds between two checks of memory.
_EVERY_S = 1.0


class Garbage:
    """Stops automatic collections at the first step, and collects between epochs.

    Objects that exist at the first step are traversed again only if memory has grown. Collections
    that the script requests in each step are skipped; other requested collections run.
    """

    def __init__(self, torch: Any, steps: ScriptSteps) -> None:
        self._steps = steps
        self._collect = gc.collect
        self._resident = 0
        self._due = 0.0
        self._collected_at = 0
        self._is_frozen = False
        steps.after.append(self._after_step)
        wrap(gc, "collect", "cures", self._collected)
        owner = sys.modules["torch.utils.data.dataloader"].DataLoader
        wrap(owner, "__iter__", "cures", self._iterated)

    def _after_step(self) -> None:
        if self._steps.count == 1 and gc.isenabled():
            gc.disable()
            self._collect_all()
            took(FIELD, "garbage is collected between epochs")
        if monotonic() < self._due:
            return
        self._due = monotonic() + _EVERY_S
        if resident_bytes() > self._resident * (1 + _GROWTH) + _GROWTH_BYTES:
            self._collect_all()

    def _collect_all(self) -> None:
        if self._is_frozen:
            gc.unfreeze()
        self._collect_now()
        if self._is_frozen or not gc.get_freeze_count():  # otherwise the script froze objects
            gc.freeze()
            self._is_frozen = True

    def _collect_now(self) -> None:
        self._collect()
        self._collected_at = self._steps.count
        self._resident = resident_bytes()
        self._due = monotonic() + _EVERY_S

    def _collected(self, original: Callable[[int], int]) -> Callable[[int], int]:
        steps = self._steps

        def collect(generation: int = 2) -> int:
            if get_ident() == steps.thread and is_on() and steps.is_in_each(caller()):
                took(FIELD, "garbage is collected between epochs")
                return 0
            return original(generation)

        return collect

    def _iterated(self, original: Any) -> Any:
        steps = self._steps

        def iterate(loader: Any) -> Any:
            is_new = steps.count > self._collected_at and not gc.isenabled()
            if is_new and get_ident() == steps.thread and is_on():
                self._collect_now()
            return original(loader)

        return iterate
