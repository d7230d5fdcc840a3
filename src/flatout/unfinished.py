"""Names of files that are still being written, which identify the writer.

`.tmp-<host>-<pid>-<start of that process>-<count>`: a process that is killed leaves such a name. It
may be removed once its writer is gone, and only by a process that can check this.
"""

from __future__ import annotations

import itertools
import os
import re
import socket
from contextlib import suppress
from pathlib import Path

from flatout.processes import state_and_start

_count = itertools.count()
_PATTERN = re.compile(r"\.tmp-(?P<host>[A-Za-z0-9._]+)-(?P<pid>\d+)-(?P<start>\d+)-\d+(\.part)?")


def new_name() -> str:
    """Return a name that no other writer, thread or earlier process has."""
    pid = os.getpid()
    return f".tmp-{_host()}-{pid}-{_started(pid)}-{next(_count)}"


def is_unfinished(name: str) -> bool:
    """Return whether `name` is one of these names."""
    return _PATTERN.fullmatch(name) is not None


def is_abandoned(name: str) -> bool:
    """Return whether `name` is one of these names and its writer ran on this host and is gone."""
    match = _PATTERN.fullmatch(name)
    if match is None or match["host"] != _host():
        return False
    start = _started(int(match["pid"]))
    # 0: the start is unknown, so a living process of that number counts as the writer.
    return start is None or (0 not in (start, int(match["start"])) and start != int(match["start"]))


def remove_abandoned(folder: Path) -> None:
    """Remove the files in a folder whose writers ran on this host and are gone."""
    with suppress(OSError):
        for name in filter(is_abandoned, os.listdir(folder)):
            with suppress(OSError):
                os.unlink(folder / name)


def _host() -> str:
    return re.sub(r"[^A-Za-z0-9.]", "_", socket.gethostname()) or "_"


def _started(pid: int) -> int | None:
    state = state_and_start(pid)
    if state is None:
        import psutil

        return 0 if psutil.pid_exists(pid) else None
    return None if state[0] in "ZX" else state[1]
