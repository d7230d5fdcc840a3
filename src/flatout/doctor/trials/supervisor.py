"""The parent of one process of a trial: `python -m flatout.doctor.trials.supervisor JSON`.

The supervisor contains itself and thereby all its children, and starts the script. It stops,
continues and ends the script with all its children, since it adopts orphans. It reads one word per
line from standard input: stop, go, end, or interrupt, which only the script receives. When standard
input closes, the trial has been killed, and the supervisor ends everything at once. Its messages
are lines of JSON on standard output.
"""

from __future__ import annotations

import functools
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from flatout.doctor.trials import apart, contained, landlock, namespaces, overlay, own_network
from flatout.doctor.trials.relay import relay
from flatout.processes import adopt_orphans, die_with_parent

_AT_START = str(Path(__file__).parent / "at_start")
# Seconds between the request to end and the kill.
_GRACE_S = 2.0
_KILLED_WITHIN_S = 10.0


@dataclass
class _Script:
    """A running script.

    Attributes:
        root: process ID of the child of this process that ends with the script: init, or the
            script itself.
        pid: process ID of the script.
        held: how its files are contained: "overlay", "landlock" or "python".
        lacks: actions of the script that nothing contains here, as in Process.
        apart: the script's own namespaces; None without.
    """

    root: int
    pid: int
    held: str
    lacks: list[str]
    apart: apart.Apart | None = None

    def interrupt(self) -> None:
        if self.apart is not None:
            signal.pidfd_send_signal(self.apart.descriptor, signal.SIGINT)
        else:
            os.kill(self.pid, signal.SIGINT)  # the ID is not reused until this process reaps it


def main(how: dict[str, Any]) -> None:
    """Contain this process, start the script, and obey the trial's commands."""
    adopt_orphans(True)
    try:
        _contain(how)
    except Exception as error:
        _say({"cannot": f"{error}"})
        return
    os.environ[contained.VARIABLE] = json.dumps({k: how[k] for k in how if k != "command"})
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, (_AT_START, os.environ.get("PYTHONPATH")))
    )
    try:
        script = _started(how)
    except OSError as error:
        _say({"cannot": f"{error.filename or how['command'][0]}: {error.strerror}"})
        return
    _say({"pid": script.pid, "held": script.held, "lacks": script.lacks})
    _obey(script)


def _contain(how: dict[str, Any]) -> None:
    folder, temporary = Path(how["folder"]), Path(how["temporary"])
    if not how["is_redirected"]:
        upper = folder / "upper"
        upper.mkdir()
        overlay.enter(upper, _passes(how), writes=_writable_paths(how["command"]))
        return
    os.environ["TMPDIR"] = str(temporary)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(temporary / "inductor")
    os.environ["TRITON_CACHE_DIR"] = str(temporary / "triton")
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"


def _passes(how: dict[str, Any]) -> list[Path]:
    return [Path(how["temporary"]), *map(Path, how["passes"])]


def _writable_paths(command: Sequence[str]) -> list[str]:
    """Return paths in the command's words, and folders that programs write to by default."""
    parts = [part for word in command for part in (word, word.partition("=")[2]) if "/" in part]
    homes = [os.environ.get(name, "") for name in ("HOME", "TMPDIR", "FLATOUT_CACHE")]
    return [path for path in (*parts, *homes) if os.path.isabs(path) and "\0" not in path]


def _restrict(how: dict[str, Any]) -> str:
    if not how["is_redirected"]:
        return "overlay"
    writable = [Path(how["folder"]), *_passes(how), Path("/dev"), Path("/proc")]
    return "landlock" if landlock.restrict_writes(writable) else "python"


def _started(how: dict[str, Any]) -> _Script:
    processes, network = namespaces.PROCESSES, namespaces.NETWORK
    may = how["apart"]
    if own_network.meets_elsewhere(how["command"]):
        may &= ~network
    for kinds in (processes | network, processes, network):
        if kinds & ~may:
            continue
        begin = functools.partial(_begun, how, kinds)
        try:
            result = apart.start(begin, kinds, Path(how["temporary"]))
        except OSError:
            continue
        _relay(result.services)
        contains, lacks = result.said
        return _Script(result.init, result.script, contains, lacks, result)
    pid, (contains, lacks) = _begun(how, 0)
    return _Script(pid, pid, contains, lacks)


def _begun(how: dict[str, Any], kinds: int) -> tuple[int, tuple[str, list[str]]]:
    lacks = []
    if not kinds & namespaces.PROCESSES:
        lacks += [] if landlock.restrict_signals() else ["signals"]
        lacks.append("orphans")
    if not kinds & namespaces.NETWORK:
        lacks.append("ranks" if own_network.meets_elsewhere(how["command"]) else "network")
    contains = _restrict(how)
    return _start(how["command"]), (contains, lacks)


def _start(command: list[str]) -> int:
    parent = os.getpid()
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr,
        stderr=sys.stderr,
        start_new_session=True,
        preexec_fn=lambda: die_with_parent(parent),  # this process has one thread
    ).pid


def _relay(services: list[socket.socket]) -> None:
    if not services:
        return
    supervisor = os.getpid()
    if not os.fork():
        try:
            die_with_parent(supervisor)
            relay(services)
        finally:
            os._exit(0)
    for service in services:
        service.close()


def _obey(script: _Script) -> None:
    asked = os.fdopen(0, "rb", buffering=0)
    descriptor = os.pidfd_open(script.root)
    waiting = b""
    while True:
        ready, _, _ = select.select([asked.fileno(), descriptor], [], [], 1.0)
        status = _reap(script.root)
        if status is not None:
            if script.apart is not None:
                status = script.apart.status()
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
                script.interrupt()
            else:
                _signal_all(signal.SIGSTOP if word == b"stop" else signal.SIGCONT)
            _say({"did": word.decode()})


def _reap(root: int) -> int | None:
    result = None
    with suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            if pid == root:
                result = os.waitstatus_to_exitcode(status)
    return result


def _signal_all(number: int) -> None:
    reached: set[tuple[int, float]] = set()
    while True:
        below = {(item.pid, item.create_time()): item for item in _below()}
        new = below.keys() - reached
        if not new:
            return
        for key in new:
            with suppress(psutil.NoSuchProcess):
                below[key].send_signal(number)
        reached |= new


def _below() -> list[psutil.Process]:
    return [item for item in psutil.Process().children(recursive=True) if _lives(item)]


def _lives(value: psutil.Process) -> bool:
    try:
        return bool(value.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _end(grace_s: float) -> None:
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
