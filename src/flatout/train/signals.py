"""Stop requests: Ctrl-C, SIGTERM and SIGUSR1 are recorded, and take effect after a step."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

_Handler = Callable[[int, FrameType | None], Any] | int | None


class Interrupted(SystemExit):
    """Training was stopped by a signal, after a checkpoint; exits with 128 + the signal."""

    def __init__(self, signum: int, checkpoint: str) -> None:
        super().__init__(128 + signum)
        self.signum = signum
        self.checkpoint = checkpoint


class StopSignals:
    """A context in which the first SIGINT, SIGTERM or SIGUSR1 is only recorded in `received`.

    A second SIGINT raises KeyboardInterrupt at once. Outside the main thread, where Python allows
    no handlers, nothing is changed.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self._before: dict[int, _Handler] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
                # A handler that was not set from Python (None) could not be restored.
                if signal.getsignal(signum) not in (None, signal.SIG_IGN):
                    self._before[signum] = signal.signal(signum, self._note)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)
        self._before.clear()

    def pass_on(self) -> None:
        """Raise a signal again that came too late to stop training, for the earlier handler."""
        if self.received is not None:
            signal.raise_signal(self.received)

    def _note(self, signum: int, frame: FrameType | None) -> None:
        if self.received is not None and signum == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = signum


NOTEBOOK = "FLATOUT_NOTEBOOK"
"""Environment variable that is set in the ranks of a notebook's fit."""


def is_interactive() -> bool:
    """Return whether this is a notebook or prompt, where Ctrl-C must not end the interpreter."""
    if hasattr(sys, "ps1") or NOTEBOOK in os.environ:
        return True
    # Scripts may import parts of IPython too, but then there is no shell.
    ipython = sys.modules.get("IPython")
    return ipython is not None and ipython.get_ipython() is not None
