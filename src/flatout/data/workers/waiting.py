"""Waits for other processes. A wait is reported, and ends when a signal stops the training."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from flatout.console import say_as_is
from flatout.errors import DataError

# Factor between the waiting times of two lines.
_WORDS_GROW = 4
_asked: list[Callable[[], bool]] = []


class WaitStopped(DataError):
    """End of a wait, because a signal stopped the training."""


@contextmanager
def waits_end_when(asked: Callable[[], bool]) -> Iterator[None]:
    """Within the block, end each `Waiting` in any thread once `asked` returns True."""
    _asked.append(asked)
    try:
        yield
    finally:
        _asked.remove(asked)


class Waiting:
    """One wait. The waiting code calls `look` repeatedly."""

    def __init__(
        self,
        what: Callable[[], str],
        say: Callable[[str], None] = say_as_is,
        first_s: float = 5.0,
    ) -> None:
        self._what, self._say = what, say
        self._start = time.monotonic()
        self._word_at = first_s

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._start

    def look(self) -> None:
        """Print what the code waits for, when a line is due."""
        if any(asked() for asked in tuple(_asked)):
            raise WaitStopped(f"stopped by a signal while waiting for {self._what()}")
        if self.seconds >= self._word_at:
            self._say(f"waited {self.seconds:.0f} s so far for {self._what()}")
            self._word_at *= _WORDS_GROW
