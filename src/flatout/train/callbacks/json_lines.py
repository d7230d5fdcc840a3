"""A log as JSON lines."""

from __future__ import annotations

import json
import os
import stat
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from flatout.train.callbacks.callback import Callback
from flatout.train.callbacks.rate import Rate
from flatout.train.history import json_safe

if TYPE_CHECKING:
    from flatout.train.state import FitState


class JsonLines(Callback):
    """Writes one JSON object per line, without delay.

    Every `every` steps, with the mean loss of the epoch so far and the time in Unix seconds:

        {"kind": "step", "step": 50, "epoch": 1, "loss": 0.7, "lr": 0.001, "samples_per_s": 12000.0,
         "time": 1790000000.0}

    After each epoch, a line has its logs, with `"kind": "epoch"`. Epochs count from 1. Numbers that
    are not finite are null. A resumed fit continues after the resumed step: later lines of an
    interrupted run are deleted. If the disk is full, one warning is shown, and training continues
    without the log.
    """

    def __init__(self, path: str | os.PathLike[str], every: int = 50) -> None:
        self.path = Path(path)
        self.every = every
        self._file: BinaryIO | None = None
        self._rate = Rate()

    def on_fit_start(self, state: FitState) -> None:
        """Open the file at the line where the fit continues."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            # Unbuffered, so that each line is in the file at once.
            self._file = self.path.open("ab", buffering=0)
            # A pipe or a device cannot be truncated.
            if self.path.is_file():
                self._file.truncate(_end_of_step(self.path.read_bytes(), state.step))
        except OSError as error:
            self._give_up(error)

    def on_epoch_start(self, state: FitState) -> None:
        """Leave the time between epochs out of the throughput."""
        self._rate.restart(state.samples)

    def on_step(self, state: FitState) -> None:
        """Write a line about the steps since the last line."""
        if self._file is None:
            return
        figures = {
            "loss": state.read_loss(),
            "lr": state.learning_rate,
            "samples_per_s": self._rate.samples_per_s(state.samples),
        }
        self._write("step", state, figures)

    def on_epoch_end(self, state: FitState) -> None:
        """Write the logs of the epoch."""
        self._write("epoch", state, state.logs)

    def on_fit_end(self, state: FitState) -> None:
        """Close the file."""
        self._close()

    def on_fit_error(self, state: FitState, error: BaseException) -> None:
        """Close the file."""
        self._close()

    def _write(self, kind: str, state: FitState, figures: dict[str, float]) -> None:
        if self._file is None:
            return
        where = {"kind": kind, "step": state.step, "epoch": state.epoch + 1}
        line = json.dumps(json_safe({**where, **figures, "time": round(time.time(), 3)}))
        data = line.encode() + b"\n"
        end = os.fstat(self._file.fileno()).st_size
        try:
            if self._is_removed():
                self._file.close()
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self._file, end = self.path.open("ab", buffering=0), 0
            # A full disk is reported only by a further write, so a short write is repeated.
            written = self._file.write(data)
            while written < len(data):
                written += self._file.write(data[written:])
        except OSError as error:
            if self.path.is_file():
                self._file.truncate(end)
            self._give_up(error)

    def _is_removed(self) -> bool:
        assert self._file is not None
        result = os.fstat(self._file.fileno())
        return stat.S_ISREG(result.st_mode) and not result.st_nlink

    def _give_up(self, error: OSError) -> None:
        self._close()
        warnings.warn(
            f"the log cannot be written and stops here, training goes on: {error.strerror}\n"
            f"  {self.path}",
            stacklevel=2,
        )

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def _end_of_step(log: bytes, step: int) -> int:
    """Return the bytes of a log up to its last whole line about this or an earlier step.

    A fit from the start keeps all whole lines, because another fit has written them.
    """
    lines = log.splitlines(keepends=True)
    while lines and (not lines[-1].endswith(b"\n") or 0 < step < _step_of(lines[-1])):
        lines.pop()
    return sum(map(len, lines))


def _step_of(line: bytes) -> int:
    try:
        entry: Any = json.loads(line)
    except ValueError:
        return 0
    step = entry.get("step", 0) if isinstance(entry, dict) else 0
    return step if isinstance(step, int) else 0
