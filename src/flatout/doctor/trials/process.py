"""One contained process of a script, as the trial controls it."""

from __future__ import annotations

import json
import math
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flatout.doctor.trials.contained import REFUSED
from flatout.doctor.trials.namespaces import NETWORK, PROCESSES
from flatout.doctor.trials.offline import offline
from flatout.doctor.trials.scratch import scratch, temporary_of
from flatout.errors import FlatoutError

_TAIL = 4096
_ANSWERS_WITHIN_S = 30.0


@dataclass(frozen=True)
class Command:
    """The command of one side of a trial.

    Attributes:
        command: program and arguments, such as [sys.executable, "train.py"].
        variables: environment variables that are added to the caller's environment.
    """

    command: Sequence[str]
    variables: Mapping[str, str] = field(default_factory=dict)


class Ended(FlatoutError):
    """Raised when a process of a trial cannot go on, with the reason."""


class Process:
    """A script that runs contained, from construction until `end`.

    Args:
        job: command to run, in the current folder.
        folder: folder of this process, within the trial's folder.
        temporary: folder of this process for temporary files and logs.
        passes: folders whose files it may change.
        is_redirected: redirect files; None means only if the kernel cannot overlay files.
        apart: kinds of namespaces to make if the kernel allows them, as flags of namespaces.py.

    Attributes:
        held: how its files are contained: "overlay", "landlock" or "python".
        lacks: actions of the script that nothing contains here. "signals": signals to other
            processes of the user. "orphans": children that may outlive a killed supervisor.
            "network": connections of native code and child programs. "ranks": the same connections,
            since the script's ranks meet on another machine.
        pid: process ID of the script.
        printed: the file that holds its output.
        exit: its exit code, -N if signal N ended it; None until known.
    """

    def __init__(
        self,
        job: Command,
        folder: Path,
        temporary: Path,
        *,
        passes: Sequence[Path] = (),
        is_redirected: bool | None = None,
        apart: int = PROCESSES | NETWORK,
    ) -> None:
        folder.mkdir()
        temporary.mkdir()
        self._temporary = temporary
        self.printed = folder / "output"
        self._waiting = b""
        self.exit: int | None = None
        how = {
            "folder": str(folder),
            "temporary": str(temporary),
            "passes": [os.path.realpath(item) for item in (temporary, *passes)],
            "command": list(job.command),
            "apart": apart,
        }
        variables = {**os.environ, **offline(temporary), **job.variables}
        for tried in [False, True] if is_redirected is None else [is_redirected]:
            reply = self._start({**how, "is_redirected": tried}, variables)
            if "cannot" not in reply:
                self.pid, self.held = int(reply["pid"]), str(reply["held"])
                self.lacks = [str(item) for item in reply["lacks"]]
                return
            self._close()
        raise FlatoutError(f"a trial cannot begin: {reply['cannot']}")

    def _start(self, how: dict[str, Any], variables: Mapping[str, str]) -> dict[str, Any]:
        with open(self.printed, "wb") as output:
            self._supervisor = subprocess.Popen(
                # -P: files in the user's folder must not be imported as modules by the supervisor.
                [sys.executable, "-P", "-m", "flatout.doctor.trials.supervisor", json.dumps(how)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                env=dict(variables),
                start_new_session=True,
            )
        return self._heard(time.monotonic() + _ANSWERS_WITHIN_S)

    @property
    def said(self) -> int:
        """File descriptor that is ready when the supervisor has sent a message to `hear`."""
        assert self._supervisor.stdout is not None
        return self._supervisor.stdout.fileno()

    def hear(self) -> None:
        """Receive the supervisor's message that the script has ended.

        Raises:
            Ended: always, with the reason.
        """
        self.exit = self._heard(math.inf).get("exit")
        raise Ended(self._why())

    def wait(self) -> int | None:
        """Wait until the script ends; return its exit code, -N if signal N ended it."""
        with suppress(Ended):
            while self.exit is None:
                self.hear()
        return self.exit

    def stop(self) -> None:
        """Stop the script and all its children."""
        self._ask("stop")

    def go(self) -> None:
        """Let the stopped script go on."""
        self._ask("go")

    def interrupt(self) -> None:
        """Ask the script to end, as Ctrl-C does; its children do not get the signal."""
        self._ask("interrupt")

    def end(self) -> None:
        """End the script and all its children."""
        with suppress(FlatoutError, OSError):
            if self.exit is None and self._supervisor.poll() is None:
                self._ask("end")
        self._close()

    def _ask(self, word: str) -> None:
        assert self._supervisor.stdin is not None
        with suppress(BrokenPipeError):  # the script has ended; its last message is read below
            self._supervisor.stdin.write(word.encode() + b"\n")
            self._supervisor.stdin.flush()
        reply = self._heard(time.monotonic() + _ANSWERS_WITHIN_S)
        if reply.get("did") != word:
            self.exit = reply.get("exit")
            raise Ended(self._why())

    def _heard(self, until: float) -> dict[str, Any]:
        while b"\n" not in self._waiting:
            left = None if until == math.inf else max(until - time.monotonic(), 0)
            ready, _, _ = select.select([self.said], [], [], left)
            read = os.read(self.said, 65536) if ready else b""
            if not read:
                raise Ended("the process that watches the script has ended or does not answer")
            self._waiting += read
        line, _, self._waiting = self._waiting.partition(b"\n")
        return dict(json.loads(line))

    def _close(self) -> None:
        # When its standard input closes, the supervisor ends everything below it.
        assert self._supervisor.stdin is not None
        assert self._supervisor.stdout is not None
        with suppress(BrokenPipeError):
            self._supervisor.stdin.close()
        try:
            self._supervisor.wait(_ANSWERS_WITHIN_S)
        except subprocess.TimeoutExpired:
            self._supervisor.kill()
            self._supervisor.wait()
        self._supervisor.stdout.close()
        self._waiting = b""

    def refused(self) -> list[dict[str, str]]:
        """Return the refused actions, once for each line of the user's: what, where, kind."""
        try:
            lines = (self._temporary / REFUSED).read_text(encoding="utf-8").splitlines()
        except OSError:
            return []
        return [json.loads(line) for line in dict.fromkeys(lines)]

    def output(self) -> str:
        """Return the end of the script's output."""
        with suppress(OSError), open(self.printed, "rb") as file:
            file.seek(max(self.printed.stat().st_size - _TAIL, 0))
            return file.read().decode(errors="replace")
        return ""

    def _why(self) -> str:
        for refused in self.refused():
            if self.exit != 0:
                return f"the script ended: {refused['what']} ({refused['where']})"
        if self.exit == 0:
            return "the script ended by itself before the trial did"
        if self.exit == -signal.SIGKILL:
            return "the script was killed (signal 9), as the system does when memory runs out"
        if self.exit is not None and self.exit < 0:
            return f"the script was ended by {signal.Signals(-self.exit).name}"
        last = [line for line in self.output().splitlines() if line.strip()][-1:]
        return f"the script failed: {last[0].strip() if last else f'exit code {self.exit}'}"


def containment(command: Sequence[str]) -> tuple[str, list[str]]:
    """Return `held` and `lacks` of a trial's processes, tested with a process that does nothing.

    Args:
        command: command that trials would run.

    Raises:
        FlatoutError: a trial cannot begin here.
    """
    with scratch() as folder:
        nothing = Command([sys.executable, "-c", "", *command])
        process = Process(nothing, folder / "nothing", temporary_of(folder) / "nothing")
        process.end()
        return process.held, process.lacks
