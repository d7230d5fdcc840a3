"""Observation of a live notebook kernel: the training in its cells, only while they run."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from flatout.observe.observation import Observation
from flatout.observe.sites import name_files, set_home
from flatout.observe.start import Asked, Observer


class Cells:
    """The cells of a notebook, observed one after another.

    Time between two cells is not counted. Hooks stay installed, and do nothing outside of cells. A
    process has only one Cells.

    Args:
        named: function that returns the name of a file: "cell 3" for a cell, otherwise the file's
            own name.
    """

    def __init__(self, named: Callable[[str], str]) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="flatout-observe-")
        set_home(os.getcwd())
        name_files(named)
        self._observer = Observer(Asked(Path(self._folder.name), None, None, None, ["notebook"]))
        self._began: float | None = time.monotonic()
        self._seconds = 0.0

    def begin(self) -> None:
        """Record the beginning of a cell."""
        if self._began is None:
            self._began = time.monotonic()
            self._observer.watch.lanes.resume()

    def end(self, *, failed: bool = False) -> None:
        """Record the end of a cell, or its failure."""
        if self._began is not None:
            self._seconds += time.monotonic() - self._began
            self._began = None
            self._observer.watch.lanes.pause(keep=not failed)

    def look(self) -> tuple[Observation, float]:
        """Return and forget the observation since the last call, with its length in seconds."""
        with self._between():
            observation, seconds = self._observer.so_far(), self._seconds
            self._forget()
        return observation, seconds

    def forget(self) -> None:
        """Begin again, as if nothing had been observed."""
        with self._between():
            self._forget()

    @contextmanager
    def _between(self) -> Iterator[None]:
        was_running = self._began is not None
        self.end()
        yield
        if was_running:
            self.begin()

    def rest(self) -> None:
        """Observe nothing until `wake` is called."""
        self.end()
        self._forget()
        self._observer.stop_writing()

    def wake(self) -> None:
        """Continue the observation."""
        self._observer.begin_writing()
        self.begin()

    def _forget(self) -> None:
        self._observer.forget()
        self._seconds = 0.0
