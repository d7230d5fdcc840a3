"""The parent of one process of a trial: `python -m flatout.doctor.trials.keeper JSON`.

It contains itself, and so all that it starts; starts the script; and stops, continues and ends it
with everything that it has begun, since orphans below it become its children. It hears one word a
line on its standard input: stop, go, end, or interrupt, which only the script hears. When that
closes, the trial has been killed, and it ends everything at once. What it has to say is a line of
JSON on its standard output.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from flatout.doctor.trials import contained, landlock, overlay
from flatout.lifetimes import adopt_orphans, die_with_parent

_AT_START = str(Path(__file__).parent / "at_start")
# Between being asked to end and being killed.
_GRACE_S = 2.0
_KILLED_WITHIN_S = 10.0


def main(how: dict[str, Any]) -> None:
    """Contain this process, start the script, and obey.

    Args:
        how: folder, temporary, passes, is_redirected and command, as trials/process.py gives them.
    """
    adopt_orphans(True)
    try:
        held = _contain(how)
    except Exception as error:
        _say({"cannot": f"{error}"})
        return
    os.environ[contained.VARIABLE] = json.dumps({k: how[k] for k in how if k != "command"})
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, (_AT_START, os.environ.get("PYTHONPATH")))
    )
    keeper = os.getpid()

    try:
        script = subprocess.Popen(
            how["command"],
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr,
            stderr=sys.stderr,
            start_new_session=True,
            preexec_fn=lambda: die_with_parent(keeper),  # this process has one thread
        ).pid
    except OSError as error:
        _say({"cannot": f"{how['command'][0]}: {error.strerror}"})
        return
    _say({"pid": script, "held": held})
    _obey(script)


def _contain(how: dict[str, Any]) -> str:
    """Returns by what this process is contained now: "overlay", "landlock" or "python"."""
    folder, temporary = Path(how["folder"]), Path(how["temporary"])
    passes = [temporary, *map(Path, how["passes"])]
    if not how["is_redirected"]:
        upper = folder / "upper"
        upper.mkdir()
        overlay.enter(upper, passes)
        return "overlay"
    os.environ["TMPDIR"] = str(temporary)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(temporary / "inductor")
    os.environ["TRITON_CACHE_DIR"] = str(temporary / "triton")
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    kernels = [Path("/dev"), Path("/proc")]
    return "landlock" if landlock.restrict_writes([folder, *passes, *kernels]) else "python"


def _obey(script: int) -> None:
    asked = os.fdopen(0, "rb", buffering=0)
    ended = os.pidfd_open(script)
    waiting = b""
    while True:
        ready, _, _ = select.select([asked.fileno(), ended], [], [], 1.0)
        status = _reap(script)
        if status is not None:
            _end(grace_s=0)
            _say({"exit": status})
            return
        if asked.fileno() not in ready:
            continue
        read = asked.read(64)
        if not read:
            _end(grace_s=0)
            return
        *words, waiting = (waiting + read).split(b"\n")
        for word in words:
            if word == b"end":
                _end(_GRACE_S)
                _say({"did": "end"})
                return
            if word == b"interrupt":
                os.kill(script, signal.SIGINT)  # its number is its own until it is reaped, here
            else:
                _signal_all(signal.SIGSTOP if word == b"stop" else signal.SIGCONT)
            _say({"did": word.decode()})


def _reap(script: int) -> int | None:
    """Takes leave of the children that have ended; returns the script's exit code if it has."""
    found = None
    with suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            if pid == script:
                found = os.waitstatus_to_exitcode(status)
    return found


def _signal_all(number: int) -> None:
    """Sends a signal to all that this process has begun, also to what is begun meanwhile."""
    reached: set[tuple[int, float]] = set()
    while True:
        below = {(one.pid, one.create_time()): one for one in _below()}
        new = below.keys() - reached
        if not new:
            return
        for key in new:
            with suppress(psutil.NoSuchProcess):
                below[key].send_signal(number)
        reached |= new


def _below() -> list[psutil.Process]:
    return [one for one in psutil.Process().children(recursive=True) if _lives(one)]


def _lives(one: psutil.Process) -> bool:
    try:
        return bool(one.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _end(grace_s: float) -> None:
    """Ends all that this process has begun: asked first, then killed."""
    if grace_s:
        _signal_all(signal.SIGTERM)
        _signal_all(signal.SIGCONT)
        _wait_until(lambda: not _below(), grace_s)
    killed_by = time.monotonic() + _KILLED_WITHIN_S
    while _below() and time.monotonic() < killed_by:
        _signal_all(signal.SIGKILL)
        _wait_until(lambda: not _below(), 0.2)


def _wait_until(is_so: Callable[[], bool], seconds: float) -> None:
    until = time.monotonic() + seconds
    while not is_so() and time.monotonic() < until:
        _reap(-1)
        time.sleep(0.01)


def _say(what: dict[str, Any]) -> None:
    with suppress(BrokenPipeError):
        print(json.dumps(what), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
