"""The observed script as a process, contained as in a trial, or in place."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import psutil

from flatout.doctor.trials.process import Command, Ended, Process
from flatout.processes import adopt_orphans, die_with_parent

_TERMINATES_WITHIN_S = 3.0


class Subject(Protocol):
    """A script that runs until it ends, or until `end` is called.

    Attributes:
        printed: the file that holds its output.
        code: the script's exit code, -N if signal N ended it; None until known.
        held: how its file access is contained: "overlay", "landlock" or "python"; "" in place.
        lacks: actions of the script that nothing contains here, as in trials.process.Process; empty
            in place.
    """

    printed: Path
    code: int | None
    held: str
    lacks: list[str]

    def has_ended(self, within_s: float) -> bool:
        """Wait at most `within_s` seconds for the script's end; return True if it has ended."""

    def interrupt(self) -> None:
        """Ask the script to end, as Ctrl-C does."""

    def end(self) -> None:
        """End the script and all processes that it has started."""

    def refused(self) -> list[dict[str, str]]:
        """Return the actions that the script was not allowed to do: {"kind", "what", "where"}."""


class Contained:
    """A script that writes to a scratch folder, and cannot send anything over the network."""

    def __init__(self, command: Sequence[str], folder: Path, temporary: Path, passes: Path) -> None:
        self._process = Process(Command(command), folder, temporary, passes=[passes])
        self.printed = self._process.printed
        self.held, self.lacks = self._process.held, self._process.lacks
        self.code: int | None = None

    def has_ended(self, within_s: float) -> bool:
        """Wait at most `within_s` seconds for the script's end; return True if it has ended."""
        if self.code is None and self._process.exit is None:
            ready, _, _ = select.select([self._process.said], [], [], within_s)
            if not ready:
                return False
            with suppress(Ended):
                self._process.hear()
        # Without an exit code the supervisor was killed, as the kernel does when out of memory.
        self.code = -signal.SIGKILL if self._process.exit is None else self._process.exit
        return True

    def interrupt(self) -> None:
        """Ask the script to end, as Ctrl-C does."""
        with suppress(Ended):
            self._process.interrupt()

    def end(self) -> None:
        """End the script and all processes that it has started."""
        self._process.end()

    def refused(self) -> list[dict[str, str]]:
        """Return the actions that the script was not allowed to do: {"kind", "what", "where"}."""
        return self._process.refused()


class InPlace:
    """A script whose writes are not redirected."""

    held = ""

    def __init__(self, command: Sequence[str], printed: Path) -> None:
        self.printed = printed
        self.lacks: list[str] = []
        self.code: int | None = None
        self._before = set(psutil.Process().children(recursive=True))
        # Orphans of the script become children of this process, so that it finds them.
        adopt_orphans(True)
        with printed.open("wb") as output:
            self._script = subprocess.Popen(
                list(command),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                preexec_fn=die_with_parent,
            )

    def has_ended(self, within_s: float) -> bool:
        """Wait at most `within_s` seconds for the script's end; return True if it has ended."""
        # Without reaping: the kernel does not reuse the process ID of an unreaped process.
        until = time.monotonic() + within_s
        how = os.WEXITED | os.WNOWAIT | os.WNOHANG
        while (status := os.waitid(os.P_PID, self._script.pid, how)) is None:
            if time.monotonic() > until:
                return False
            time.sleep(0.02)
        exited = status.si_code == os.CLD_EXITED
        self.code = status.si_status if exited else -status.si_status
        return True

    def interrupt(self) -> None:
        """Ask the script to end, as Ctrl-C does."""
        os.kill(self._script.pid, signal.SIGINT)

    def end(self) -> None:
        """End the script's process group, then the processes that have left the group."""
        if self.code is None:
            os.kill(self._script.pid, signal.SIGTERM)
            self.has_ended(_TERMINATES_WITHIN_S)
        os.killpg(self._script.pid, signal.SIGKILL)
        self._script.wait()
        # The children of a killed process may become children of this one, so search again.
        while left := [
            item for item in psutil.Process().children(recursive=True) if item not in self._before
        ]:
            for child in left:
                with suppress(psutil.NoSuchProcess):
                    child.kill()
            psutil.wait_procs(left, timeout=5.0)
        adopt_orphans(False)

    def refused(self) -> list[dict[str, str]]:
        """Return an empty list: nothing is refused in place."""
        return []
