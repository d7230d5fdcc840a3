"""Runs a script under observation for some seconds, and leaves no process of it behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

import psutil

from flatout.doctor.torchrun import under_torchrun
from flatout.lifetimes import adopt_orphans, die_with_parent
from flatout.observe import Observation

STARTING_S = 60.0
"""How long a script may take beside the time in which its steps are watched: imports, its data, the
model. It is ended then, whether it has stepped or not."""

_GRACE_S = ((signal.SIGINT, 5.0), (signal.SIGTERM, 3.0))
"""What a script is asked to end by, and how long it may take: as by Ctrl-C, so that what was seen
is written; then as by a cluster."""

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that ask this process to end."""

_LAST_LINES = 15
_LAST_BYTES = 2**16


@dataclass(frozen=True)
class FirstLook:
    """What came of it.

    Attributes:
        observations: of each rank that could say something; may be empty.
        exit_code: the script's; below 0 for the signal that killed it; None where it was ended
            from here.
        output: its last lines, empty where they were shown already.
        seconds: how long it ran.
        interrupted_by: the signal that ended this process' patience, such as Ctrl-C's; None else.
    """

    observations: list[Observation]
    exit_code: int | None
    output: list[str]
    seconds: float
    interrupted_by: int | None = None

    @property
    def failed(self) -> bool:
        """Whether the script ended with an error of its own."""
        return bool(self.exit_code) or any(rank.ended == "failed" for rank in self.observations)


def first_look(
    what: Sequence[str],
    *,
    seconds: float,
    steps: int | None = None,
    verbose: bool = False,
    starting_s: float = STARTING_S,
) -> FirstLook:
    """Runs a script as `python` would, with its standard input closed, and observes it.

    To be called from the main thread, which is where signals arrive.

    Args:
        what: the script and its arguments; a module after "-m"; or torchrun's command line.
        seconds: for how long its steps are watched, from the first one.
        steps: how many are watched at most.
        verbose: its output goes to this process' standard error; else only its end is kept.
        starting_s: how long it may take beside that.

    Raises:
        FlatoutError: torchrun's command line cannot be read.
    """
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="flatout-doctor-") as folder:
        limits = ["--seconds", f"{seconds:g}", *(["--steps", str(steps)] if steps else [])]
        observe = ["-m", "flatout.observe.start", folder, *limits]
        command = under_torchrun(what, observe) or [sys.executable, *observe, *what]
        with open(Path(folder) / "output", "wb") as kept:
            until = began + seconds + starting_s
            code, interrupted = _run(command, sys.stderr.buffer if verbose else kept, until)
        return FirstLook(
            observations=[_ended(rank, code) for rank in _read(Path(folder))],
            exit_code=code,
            output=_last_lines(Path(folder) / "output"),
            seconds=time.monotonic() - began,
            interrupted_by=interrupted,
        )


def _run(command: list[str], output: IO[bytes], until: float) -> tuple[int | None, int | None]:
    """Returns the exit code, None where the end came from here, and the signal that was met."""
    before = set(psutil.Process().children(recursive=True))
    # What the script leaves without a parent becomes a child of this process, so it can be found.
    adopt_orphans(True)
    process = None
    with _signals_raise():
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                preexec_fn=die_with_parent,
            )
            if _has_ended(process, until):
                return _code(process), None
            _ask_to_end(process)
            return None, None
        except _Met as met:
            if process is not None:
                _ask_to_end(process)
            return None, met.number
        finally:
            _ignore_signals()
            if process is not None:
                _end_all(process, before)
            adopt_orphans(False)


class _Met(BaseException):
    """A signal that asks this process to end."""

    def __init__(self, number: int) -> None:
        self.number = number


@contextmanager
def _signals_raise() -> Iterator[None]:
    """Turns the signals that would end this process into an exception, once."""

    def meet(number: int, frame: object) -> None:
        _ignore_signals()  # the script is being ended already
        raise _Met(number)

    # Under nohup a hang-up is none.
    kept = [n for n in _ENDING if n != signal.SIGHUP or signal.getsignal(n) != signal.SIG_IGN]
    handlers = {number: signal.signal(number, meet) for number in kept}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _ignore_signals() -> None:
    for number in _ENDING:
        signal.signal(number, signal.SIG_IGN)


def _has_ended(process: subprocess.Popen[bytes], until: float) -> bool:
    """Waits without reaping: as long as it is not reaped, nobody else gets its number."""
    while time.monotonic() < until:
        if os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None:
            return True
        time.sleep(0.05)
    return False


def _code(process: subprocess.Popen[bytes]) -> int:
    ended = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert ended is not None
    return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status


def _ask_to_end(process: subprocess.Popen[bytes]) -> None:
    for number, patience in _GRACE_S:
        os.kill(process.pid, number)
        if _has_ended(process, time.monotonic() + patience):
            return


def _end_all(process: subprocess.Popen[bytes], before: set[psutil.Process]) -> None:
    """Ends what is left: the script's group by its number, then whoever has left the group."""
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    # Killing one may hand its children over to this process, so look again.
    while left := [p for p in psutil.Process().children(recursive=True) if p not in before]:
        for child in left:
            try:
                child.kill()
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs(left, timeout=5.0)


def _read(folder: Path) -> list[Observation]:
    """Returns what the ranks have written: each a file that is whole or absent."""
    paths = sorted(folder.glob("rank-*.json"))
    return [Observation.of(json.loads(path.read_text(encoding="utf-8"))) for path in paths]


def _ended(rank: Observation, code: int | None) -> Observation:
    """Says how a rank ended that could not say so itself, or was told to end from here."""
    if code is None and rank.ended in ("running", "failed"):
        return replace(rank, ended="stopped" if rank.steps else "no steps", error="")
    return replace(rank, ended="failed") if rank.ended == "running" else rank


def _last_lines(path: Path) -> list[str]:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _LAST_BYTES))
        text = file.read().decode("utf-8", errors="replace")
    return [line.rstrip() for line in text.splitlines() if line.strip()][-_LAST_LINES:]
