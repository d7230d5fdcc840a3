"""Writes what was seen, whole or not at all: about once a second, and at the end.

While it does, `flatout top` shows this process.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path

from flatout.atomic_file import atomic_write, private
from flatout.measure import live
from flatout.observe.observation import Observation
from flatout.world import Place

# While the script runs, writing waits so long, and longer where it would take more than this share
# of a CPU.
_EVERY_S = 1.0
_SHARE = 0.0005
# What may be over in seconds is looked at so often before that.
_LOOK_S, _LOOKS = 0.25, 8


def write(path: Path, observation: Observation) -> None:
    """Replaces the file by what was seen: a reader finds the old one or the new one."""
    with atomic_write(path, opener=private) as file:
        file.write(json.dumps(observation, default=vars))


class Writer:
    """A thread that writes now and then, for the one who looks on, and for a script that is killed.

    Attributes:
        cpu_seconds: what writing has taken from the script since its first step, after the first
            time.
        first_seconds: what that and looking at the job have, which come a few times.
    """

    def __init__(
        self,
        path: Path,
        look: Callable[[], bool],
        seen_so_far: Callable[[], Observation],
        place: Place,
    ) -> None:
        self._path = path
        self._look = look
        self._seen_so_far = seen_so_far
        self._place = place
        self._end = threading.Event()
        self.cpu_seconds = self.first_seconds = 0.0
        self._thread = threading.Thread(target=self._run, name="flatout-observe", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread; what it is writing is written first."""
        self._end.set()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout=5)
        live.remove_own_file()

    def _run(self) -> None:
        live.point_to(self._path, rank=self._place.rank, world_size=self._place.world_size)
        pause, looks, has_written = _LOOK_S, 0, False
        due = time.monotonic() + _EVERY_S
        while not self._end.wait(pause):
            began = time.thread_time()
            if looks < _LOOKS:
                looks += self._look()
                if looks:  # it steps
                    self.first_seconds += time.thread_time() - began
            began = time.thread_time()
            if time.monotonic() >= due:
                write(self._path, self._seen_so_far())
                took = time.thread_time() - began
                due = time.monotonic() + max(_EVERY_S, took / _SHARE)
                if looks and has_written:
                    self.cpu_seconds += took
                elif looks:
                    self.first_seconds += took
                has_written = bool(looks)
            left = max(0.0, due - time.monotonic())
            pause = min(left, _LOOK_S) if looks < _LOOKS else left
