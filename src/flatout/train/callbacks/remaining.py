"""Progress of a fit, in a file that a cluster's tools can show."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

from flatout.atomic_file import atomic_write
from flatout.train.callbacks.callback import Callback

if TYPE_CHECKING:
    from flatout.train.state import FitState

VARIABLE = "FLATOUT_REMAINING"
"""Environment variable with the file's path; `flatout submit` sets it in its scripts."""

_EVERY_S = 10.0
_LOOKS_PER_S = 2


class Remaining(Callback):
    """Writes a line such as `{"progress": 0.31, "remaining_s": 840, "epoch": 2, "epochs": 5}`.

    The file is written at intervals, and no failure here ends the job. If the number of steps is
    unknown, progress is measured in epochs.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.every = 1

    def on_fit_start(self, state: FitState) -> None:
        """Start the measurement."""
        self._began = self._looked = perf_counter()
        self._from, self._step = done_part(state), state.step
        self._write_at = self._began

    def on_step(self, state: FitState) -> None:
        """Write the file if enough time has passed."""
        now = perf_counter()
        pace = (state.step - self._step) / max(now - self._looked, 1e-9)
        self._step, self._looked = state.step, now
        self.every = max(1, min(int(pace / _LOOKS_PER_S), 4 * self.every))
        if now >= self._write_at:
            self._write_at = now + _EVERY_S
            self._write(state, now)

    def on_fit_end(self, state: FitState) -> None:
        """Write the final progress."""
        self._write(state, perf_counter(), ended=state.stop_reason is None)

    def _write(self, state: FitState, now: float, *, ended: bool = False) -> None:
        done = 1.0 if ended else done_part(state)
        gained = done - self._from
        remaining = (now - self._began) * (1 - done) / gained if gained > 0 else None
        data = {
            "progress": round(done, 4),
            "remaining_s": None if remaining is None else round(remaining),
            "epoch": min(state.epoch + 1, state.epochs),
            "epochs": state.epochs,
        }
        with suppress(OSError), atomic_write(self.path) as file:
            file.write(json.dumps(data) + "\n")


def asked_for() -> list[Callback]:
    """Return the callback if a cluster's script has named a file."""
    path = os.environ.get(VARIABLE)
    return [Remaining(path)] if path else []


def done_part(state: FitState) -> float:
    """Return the fraction of all epochs that is done."""
    steps = state.steps_per_epoch
    inside = min(1.0, state.step_in_epoch / steps) if steps else 0.0
    return min(1.0, (state.epoch + inside) / max(1, state.epochs))
