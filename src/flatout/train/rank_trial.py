"""A fit that only measures speed on a given number of ranks: `flatout run --devices auto`.

The command starts the script several times and ends it within its first fit. So nothing is written
to the run folder, and no code after that fit runs.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

from flatout.atomic_file import atomic_write
from flatout.world import RANK_TRIAL

_WARM_S, _WARM_STEPS, _MEASURE_S = 1.0, 3, 4.0
# Maximum seconds to wait for the end of tuning before steps are measured.
_TUNING_S = 10.0
_LOOK_EVERY_S = 0.005


def is_trial() -> bool:
    """Return whether this process trains only to be measured."""
    return RANK_TRIAL in os.environ


class RankTrial:
    """Counts the steps per second, from its own thread."""

    def __init__(self, steps: Callable[[], int], tunes: Callable[[], bool], is_first: bool) -> None:
        self._steps, self._tunes = steps, tunes
        self._is_first = is_first
        self._ended = threading.Event()
        # Time and number of the first measured step, and of the last measured step.
        self._seen: list[tuple[float, int]] = []
        threading.Thread(target=self._watch, name="flatout-rank-trial", daemon=True).start()

    def end(self) -> None:
        """Report the result if training ends before the trial, and wait to be ended."""
        self._seen.append((time.perf_counter(), self._steps()))
        self._ended.set()
        time.sleep(60)
        os._exit(0)

    def _watch(self) -> None:
        began = self._steps()
        while self._steps() == began and not self._ended.wait(_LOOK_EVERY_S):
            pass
        first = time.perf_counter()
        while self._tunes() and time.perf_counter() < first + _TUNING_S:
            if self._ended.wait(_LOOK_EVERY_S):
                break
        first, began = time.perf_counter(), self._steps()
        self._seen.insert(0, (first, self._steps()))
        while self._steps() < began + _WARM_STEPS or time.perf_counter() < first + _WARM_S:
            if self._ended.wait(_LOOK_EVERY_S):
                break
        else:
            self._seen[0] = (time.perf_counter(), self._steps())
            self._ended.wait(_MEASURE_S)
        if not self._ended.is_set():
            self._seen.append((time.perf_counter(), self._steps()))
        if self._is_first:
            self._report()

    def _report(self) -> None:
        (start, before), (stop, after) = self._seen[0], self._seen[-1]
        rate = (after - before) / (stop - start) if after > before else 0.0
        with atomic_write(os.environ[RANK_TRIAL]) as file:
            file.write(repr(rate))
