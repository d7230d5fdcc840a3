"""All losses of a whole run in a file: eight bytes each, NaN for a step without one."""

from __future__ import annotations

import atexit
import os
from array import array
from pathlib import Path

from flatout.doctor.trials.recording import Record, Stepping
from flatout.observe.lanes import Lanes

# Steps after which what has come is read from the device, and written.
_EVERY = 256


class Whole(Stepping):
    """Steps of which every loss is kept.

    Args:
        file: where they go; it grows while the script runs.
    """

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.record = _All(self.lanes, file)


class _All(Record):
    def __init__(self, lanes: Lanes, file: Path) -> None:
        super().__init__(lanes)
        self._file = file
        self._pid = os.getpid()
        atexit.register(self._write)

    def end_step(self) -> None:
        """The loss that was met first is the step's."""
        self._losses.append(self._loss)
        self._loss = None
        if len(self._losses) >= _EVERY:
            self._write()

    def _write(self) -> None:
        if os.getpid() == self._pid:  # a fork is another process
            with self._file.open("ab") as file:
                file.write(array("d", self.taken()["losses"]).tobytes())
