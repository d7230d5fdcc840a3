"""Folders in which trials write, and the remains of trials that were killed.

CACHE/trials/ID/owner.json   the owner: process ID, its start time, the machine.
CACHE/trials/ID/a/           folder of one of the two processes.
    upper/                   its writes, if the kernel overlays files.
    files/<absolute path>    its writes, if Python's functions are redirected.
    gone                     the files it has deleted, if redirected
    output                   its output
TMP/flatout-XXXX/            its temporary files. Its trial.json contains ID, so that a damaged or
                             forged owner.json cannot cause the removal of another folder
"""

from __future__ import annotations

import json
import os
import re
import secrets
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from flatout.cache_folder import cache_folder, is_made, kind_folder, remove_at
from flatout.cache_folder import remove as remove_made
from flatout.processes import machine, state_and_start

_NAME = re.compile(r"[0-9a-f]{12}(\.\d+\.new)?")
_TRIAL = "trial.json"


def trials_folder() -> Path:
    """Return the folder that contains the folders of all trials."""
    return cache_folder() / "trials"


@contextmanager
def scratch() -> Iterator[Path]:
    """Make a folder for one trial of this process, and remove it at the end.

    Folders of trials whose process has ended are removed first.
    """
    remove_left()
    folder = _made()
    try:
        yield folder
    finally:
        remove(folder)


def _made() -> Path:
    folder = kind_folder("trials") / secrets.token_hex(6)
    # Until owner.json exists, the name contains the owner, so that no other process removes it.
    new = folder.with_name(f"{folder.name}.{os.getpid()}.new")
    new.mkdir()
    # Sockets need short paths, and so are in the folder for temporary files.
    temporary = tempfile.mkdtemp(prefix="flatout-")
    Path(temporary, _TRIAL).write_text(json.dumps(folder.name))
    owner = {"pid": os.getpid(), "began": _began(os.getpid()), "machine": machine()}
    (new / "owner.json").write_text(json.dumps({**owner, "temporary": temporary}))
    os.rename(new, folder)
    return folder


def temporary_of(folder: Path) -> Path:
    """Return the trial's own folder for temporary files."""
    return Path(_owner(folder)["temporary"])


def left() -> list[Path]:
    """Return the folders of trials whose process has ended."""
    if not is_made(trials_folder()):
        return []
    result = [item for item in sorted(trials_folder().iterdir()) if _NAME.fullmatch(item.name)]
    return [item for item in result if not is_alive(item)]


def is_alive(folder: Path) -> bool:
    """Return True if a trial's process may still run, also if it belongs to another machine."""
    owner = _owner(folder)
    if not owner:
        maker = folder.name.split(".")[1:2]
        return bool(maker and maker[0].isdecimal() and _began(int(maker[0])) >= 0)
    if owner.get("machine") != machine():
        return True
    pid = owner.get("pid")
    return isinstance(pid, int) and pid > 0 and _began(pid) == owner.get("began")


def remove_left() -> None:
    """Remove the remains of trials that were killed."""
    for folder in left():
        remove(folder)


def remove(folder: Path) -> None:
    """Remove a trial's folder and its temporary files, whatever permissions the script set."""
    temporary = _owner(folder).get("temporary")
    if isinstance(temporary, str) and _is_of(Path(temporary), folder):
        remove_tree(Path(temporary))
    remove_made(folder)


def remove_tree(folder: Path) -> None:
    """Remove a folder, whatever permissions a script set within it."""
    with suppress(OSError):
        parent = os.open(folder.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            remove_at(folder.name, parent)
        finally:
            os.close(parent)


def _is_of(temporary: Path, folder: Path) -> bool:
    if temporary.is_symlink():
        return False
    try:
        named = json.loads((temporary / _TRIAL).read_text())
    except (OSError, ValueError):
        return False
    return bool(named == folder.name)


def _owner(folder: Path) -> dict[str, Any]:
    try:
        data = json.loads((folder / "owner.json").read_text())
    except (OSError, ValueError):
        return {}
    return data if isinstance(data, dict) else {}


def _began(pid: int) -> int:
    result = state_and_start(pid)
    return -1 if result is None or result[0] in "ZX" else result[1]
