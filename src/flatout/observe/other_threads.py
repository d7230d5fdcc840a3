"""Activity of the script's other threads while it steps, such as one that makes its batches.

A thread of the observation samples these threads, if the script has threads that run its own code.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from types import FrameType

from flatout.observe.observation import Observation, OtherThread, Site
from flatout.observe.sites import is_users, line_of, read
from flatout.observe.watch import Watch

# Seconds between two samples of the threads. Samples become rarer if sampling takes too much of a
# CPU.
_EVERY_S = 0.04
# Steps in which other threads are searched.
_ASKED = (1, 10, 100)
# _FEWEST: minimum number of samples of a thread that is reported; _MOST: maximum number of threads
# that are sampled.
_FEWEST, _MOST = 20, 16
_OURS = "flatout-"
# Files in which a thread waits for another thread.
_WAITS = (
    "threading.py",
    "queue.py",
    "selectors.py",
    "socket.py",
    "connection.py",
    "synchronize.py",
)


@dataclass
class _Thread:
    """Samples of one thread."""

    name: str
    looks: int = 0
    lines: Counter[tuple[str, int]] = field(default_factory=Counter)


class OtherThreads:
    """Sampler of the threads that run the user's code, except the stepping thread.

    Attributes:
        seconds: CPU seconds that sampling has taken.
    """

    def __init__(self, watch: Watch, share: float = 0.002) -> None:
        self._watch, self._share = watch, share
        self._end = threading.Event()
        self._seen: dict[int, _Thread] = {}
        self._looker: threading.Thread | None = None
        self.seconds = 0.0
        for step in _ASKED:
            watch.at(step, self._begin)
        watch.on_renewal.append(self._seen.clear)

    def _begin(self) -> None:
        own = self._watch.lanes.thread or threading.get_ident()
        if self._looker is None and any(self._of_user(own)):
            self._looker = threading.Thread(target=self._run, name=f"{_OURS}threads", daemon=True)
            self._looker.start()

    def stop(self) -> None:
        """Stop sampling; the samples are kept."""
        self._end.set()

    def fill(self, observation: Observation) -> None:
        """Add the most frequent line of each busy thread to an Observation."""
        result = []
        for thread in list(self._seen.values()):
            if thread.looks >= _FEWEST and thread.lines:
                (file, line), most = thread.lines.most_common(1)[0]
                busy = thread.lines.total() / thread.looks
                site = read(Site(file, line))
                result.append(OtherThread(thread.name, site, busy, most / thread.looks))
        observation.other_threads = sorted(result, key=lambda thread: -thread.busy)

    def _run(self) -> None:
        pause = _EVERY_S
        while not self._end.wait(pause):
            stepping = self._watch.lanes.thread
            if not stepping:
                continue  # the observation is paused
            began = time.thread_time()
            for thread, frame in self._of_user(stepping):
                self._note(thread, frame)
            took = time.thread_time() - began
            self.seconds += took
            pause = max(_EVERY_S, took / self._share)

    def _of_user(self, stepping: int) -> list[tuple[threading.Thread, FrameType]]:
        frames = sys._current_frames()
        frames.pop(threading.get_ident(), None)  # this frame would refer to itself
        result: list[tuple[threading.Thread, FrameType]] = []
        for thread in threading.enumerate():
            if len(result) == _MOST:
                break
            frame = frames.get(thread.ident or 0)
            if frame is None or thread.ident == stepping or thread.name.startswith(_OURS):
                continue
            if _users(frame) is not None:
                result.append((thread, frame))
        return result

    def _note(self, thread: threading.Thread, frame: FrameType) -> None:
        looked = self._seen.setdefault(thread.ident or 0, _Thread(thread.name))
        looked.looks += 1
        users = _users(frame)
        if users is not None and not frame.f_code.co_filename.endswith(_WAITS):
            looked.lines[users] += 1


def _users(frame: FrameType | None) -> tuple[str, int] | None:
    while frame is not None:
        if is_users(frame.f_code.co_filename):
            return frame.f_code.co_filename, line_of(frame)
        frame = frame.f_back
    return None
