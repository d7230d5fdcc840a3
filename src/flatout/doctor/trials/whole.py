"""All losses of a whole run in a file: time and loss of each step, eight bytes each.

Times are seconds of the monotonic clock, which all processes of a machine share. A step without a
loss has NaN.
"""

from __future__ import annotations

import atexit
import math
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from flatout.doctor.trials.recording import Record, Stepping
from flatout.observe import Lanes

LAST = 0.05
"""Share of the steps, from the end of a run, whose mean loss is the final loss."""

# Number of steps after which losses are read from the device and written.
_EVERY = 256


class Whole(Stepping):
    """Steps of which every loss is recorded."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.record = _All(self.lanes, file)


class _All(Record):
    def __init__(self, lanes: Lanes, file: Path) -> None:
        super().__init__(lanes)
        self._file = file
        self._at: list[float] = []
        self._pid = os.getpid()
        atexit.register(self._write)

    def end_step(self) -> bool:
        self._losses.append(self._loss)
        self._at.append(time.monotonic())
        self._loss = None
        if len(self._losses) >= _EVERY:
            self._write()
        return True

    def _write(self) -> None:
        if os.getpid() == self._pid:  # not in a forked process
            losses, at, self._at = self.taken()["losses"], self._at, []
            with self._file.open("ab") as file:
                file.write(np.array([at, losses]).T.tobytes())


@dataclass(frozen=True)
class Curve:
    """Losses of a run over time.

    Attributes:
        steps: number of steps, including those without a loss.
        at: end time of each step with a loss, in seconds; float64 of shape (steps with a loss,).
        losses: loss of each of these steps; float64 of the same shape.
    """

    steps: int
    at: np.ndarray[Any, Any]
    losses: np.ndarray[Any, Any]

    @classmethod
    def read(cls, file: Path, began: float) -> Curve:
        """Read the file of a run, with times relative to `began` of the monotonic clock."""
        written = file.read_bytes() if file.exists() else b""
        at, losses = np.frombuffer(written).reshape(-1, 2).T
        has_one = ~np.isnan(losses)
        return cls(len(losses), at[has_one] - began, losses[has_one])

    def final(self) -> float:
        """Return the mean of the last 5% of the losses; NaN if there are none."""
        last = self.losses[-self._window() :]
        return float(last.mean()) if len(last) else math.nan

    def reached(self, target: float) -> float | None:
        """Return the seconds until the mean of 5% of the losses reached `target`; None if never."""
        low = np.flatnonzero(self._means() <= target)
        return float(self.at[low[0] + self._window() - 1]) if len(low) else None

    def _means(self) -> np.ndarray[Any, Any]:
        window, finite = self._window(), np.isfinite(self.losses)
        sums = np.concatenate([[0.0], np.cumsum(np.where(finite, self.losses, 0.0))])
        counts = np.concatenate([[0], np.cumsum(finite)])
        are_finite = counts[window:] - counts[:-window] == window
        means = np.where(are_finite, (sums[window:] - sums[:-window]) / window, math.inf)
        means[-1:] = self.final()  # exact, without the sums' rounding: a run must reach its own end
        return means

    def _window(self) -> int:
        return max(1, math.ceil(LAST * len(self.losses)))
