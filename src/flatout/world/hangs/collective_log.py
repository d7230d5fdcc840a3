"""The place of a rank among the collectives of its job."""

from __future__ import annotations

import contextlib
import sys
from collections import deque
from pathlib import Path
from typing import NamedTuple

# Number of latest collectives whose names are kept: more than one rank may begin ahead of others.
_KEPT = 64
_HERE = (str(Path(__file__).parents[1] / "world.py"), contextlib.__file__)
_PACKAGE = Path(__file__).parents[2]


APART = -1
"""Number of a wait that is no collective: a rank that steps independently waits for other ranks."""


class Waiting(NamedTuple):
    """A collective that a rank has come to and that is not over.

    Attributes:
        number: number of the collective, or APART.
        since: its begin on `perf_counter_ns`' clock.
    """

    number: int
    since: int


class CollectiveLog:
    """The collectives of one rank, in order. One thread writes; any thread may read.

    Attributes:
        begun: number of collectives that this rank has come to, which is also the latest one's
            number.
        recent: number, purpose and step of each of the latest.
        step: the training step that this rank is in, or has done last.
        waiting: the collective that the rank is in now, or None.
        waited: nanoseconds spent in collectives.
        is_lost: whether the last one failed.
        passed: number of points passed at which ranks may ask together (see `World.all_ask`).
    """

    def __init__(self) -> None:
        self.begun = 0
        self.recent: deque[tuple[int, str, int]] = deque(maxlen=_KEPT)
        self.step = 0
        self.waiting: Waiting | None = None
        self.waited = 0
        self.is_lost = False
        self.passed = 0

    def restart(self) -> None:
        """Count from 0 again, with other ranks."""
        self.begun, self.waiting, self.is_lost = 0, None, False
        self.recent.clear()

    def begin(self, what: str) -> int:
        """Count the next collective, and return its number."""
        self.begun += 1
        self.recent.append((self.begun, what or _calling_line(), self.step))
        return self.begun


def named(what: str, step: int) -> str:
    return f"{what}, step {step}" if step else what


def _calling_line() -> str:
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_filename in _HERE:
        frame = frame.f_back
    path = Path(frame.f_code.co_filename)
    if path.is_relative_to(_PACKAGE):
        path = path.relative_to(_PACKAGE.parent)
    return f"{frame.f_code.co_qualname} ({path}:{frame.f_lineno})"
