"""Atomic writing of the observation: about once a second, and at the end.

Meanwhile, `flatout top` shows this process.
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

# _EVERY_S: shortest time between two writes while the script runs; _SHARE: largest share of a CPU
# that writing may take.
_EVERY_S = 1.0
_SHARE = 0.0005
# For scripts that end within seconds: _LOOK_S: seconds between early looks; _LOOKS: number of early
# looks.
_LOOK_S, _LOOKS = 0.25, 8


def write(path: Path, observation: Observation) -> None:
    """Replace the file by the observation: a reader finds the old file or the new one."""
    with atomic_write(path, opener=private) as file:
        file.write(json.dumps(observation, default=vars))


class Writer:
    """Thread that writes at intervals, for live display, and for a script that is killed.

    Attributes:
        cpu_seconds: CPU seconds of writing since the script's first step, without the first write.
        first_seconds: CPU seconds of the first write and of the early looks at the job.
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
        """Stop the thread after its current write."""
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
                if looks:  # the script steps
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
