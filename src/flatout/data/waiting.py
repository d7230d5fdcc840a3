"""Waiting for others: it is said, and it ends when a stop of the training is asked for."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from flatout.console import say_as_is
from flatout.errors import DataError

_FIRST_WORD_S = 5.0
_WORDS_GROW = 4
_asked: list[Callable[[], bool]] = []


class WaitStopped(DataError):
    """Waiting ended, because a signal has asked the training to stop."""


@contextmanager
def waits_end_when(asked: Callable[[], bool]) -> Iterator[None]:
    """Within it, whoever waits in any thread gives up when `asked` says so."""
    _asked.append(asked)
    try:
        yield
    finally:
        _asked.remove(asked)


class Waiting:
    """One wait. Whoever waits calls `look` again and again.

    Args:
        what: gives what is waited for, in words.
        say: gets a line after `first_s`, and then after four times as long each time.
        first_s: seconds; None means 5.
    """

    def __init__(
        self,
        what: Callable[[], str],
        say: Callable[[str], None] = say_as_is,
        first_s: float | None = None,
    ) -> None:
        self._what, self._say = what, say
        self._start = time.monotonic()
        self._word_at = _FIRST_WORD_S if first_s is None else first_s

    @property
    def seconds(self) -> float:
        """So far."""
        return time.monotonic() - self._start

    def look(self) -> None:
        """Say what is waited for, where it is time to.

        Raises:
            WaitStopped: a stop is asked for.
        """
        if any(asked() for asked in tuple(_asked)):
            raise WaitStopped(f"stopped by a signal while waiting for {self._what()}")
        if self.seconds >= self._word_at:
            self._say(f"waiting since {self.seconds:.0f} s for {self._what()}")
            self._word_at *= _WORDS_GROW
