"""Record of the files and folders that this process reads, written as it opens them.

Python reports opened files to audit hooks (https://docs.python.org/3/library/audit_events.html),
also in forked processes. Native code does not. Files that it keeps open or mapped are found by
polling, but not those that it opens only for a moment.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
# Seconds between two polls of open and mapped files.
_LOOK_EVERY_S = 0.1
READ, WRITTEN, LISTED = "read", "written", "listed"


def note_opened(file: Path) -> None:
    """Add a line to a file for each path when it is first opened: {"how", "path"}, as JSON."""
    # The file is kept open, since opening it for each line would be reported too. A forked process
    # shares it.
    handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    seen: set[tuple[str, str]] = set()

    def note(how: str, path: Any) -> None:
        if isinstance(path, int):
            return
        text = os.path.abspath(os.fsdecode("." if path is None else path))
        if (how, text) not in seen:
            seen.add((how, text))
            os.write(handle, f"{json.dumps({'how': how, 'path': text})}\n".encode())

    def hook(event: str, args: tuple[Any, ...]) -> None:
        with suppress(OSError, ValueError, TypeError):
            if event == "open":
                note(WRITTEN if _opens_to_write(args[1], args[2]) else READ, args[0])
            elif event in ("os.listdir", "os.scandir"):
                note(LISTED, args[0])

    def look() -> None:
        pause = threading.Event()
        while not pause.wait(_LOOK_EVERY_S):
            for path in _held_files():
                note(READ, path)

    sys.addaudithook(hook)
    threading.Thread(target=look, name="flatout-opened", daemon=True).start()


def _opens_to_write(mode: Any, flags: Any) -> bool:
    if isinstance(mode, str):
        return any(letter in mode for letter in "wax+")
    return bool(isinstance(flags, int) and flags & _WRITING)


def _held_files() -> list[str]:
    result = []
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(OSError, ValueError, IndexError):
            path = os.readlink(f"/proc/self/fd/{descriptor}")
            told = Path(f"/proc/self/fdinfo/{descriptor}").read_text()
            flags = int(told.partition("flags:")[2].split()[0], 8)
            if path.startswith("/") and not flags & _WRITING:
                result.append(path)
    with suppress(OSError):
        lines = Path("/proc/self/maps").read_text(errors="surrogateescape").splitlines()
        result += [line.split(maxsplit=5)[5] for line in lines if " /" in line]
    return [path for path in dict.fromkeys(result) if not path.endswith(" (deleted)")]
