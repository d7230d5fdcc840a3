"""The folders in which trials write, and what is left of trials that were killed.

CACHE/trials/ID/owner.json   whose it is: process, when that began, on which machine
CACHE/trials/ID/a/           of one of the two processes
    upper/                   its writes, where the kernel overlays files
    files/<absolute path>    its writes, where Python's functions are redirected
    gone                     what it has deleted, there
    output                   what it has printed
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from flatout.cache_folder import cache_folder
from flatout.lifetimes import machine, state_and_start


def trials_folder() -> Path:
    """Where the folders of all trials lie."""
    return cache_folder() / "trials"


@contextmanager
def scratch() -> Iterator[Path]:
    """A folder for one trial of this process, removed at the end.

    Folders of trials whose process is gone are removed first.
    """
    remove_left()
    folder = _made()
    try:
        yield folder
    finally:
        remove(folder)


def _made() -> Path:
    folder = trials_folder() / secrets.token_hex(6)
    # A name that says itself whose it is, until the file does: no other start takes it for left.
    new = folder.with_name(f"{folder.name}.{os.getpid()}.new")
    new.mkdir(parents=True)
    # Sockets have short names, and lie in the folder for temporary files.
    temporary = tempfile.mkdtemp(prefix="flatout-")
    owner = {"pid": os.getpid(), "began": _began(os.getpid()), "machine": machine()}
    (new / "owner.json").write_text(json.dumps({**owner, "temporary": temporary}))
    os.rename(new, folder)
    return folder


def temporary_of(folder: Path) -> Path:
    """The trial's own folder for temporary files."""
    return Path(_owner(folder)["temporary"])


def left() -> list[Path]:
    """Folders of trials whose process is gone."""
    with suppress(OSError):
        return [one for one in sorted(trials_folder().iterdir()) if not is_alive(one)]
    return []


def is_alive(folder: Path) -> bool:
    """Whether a trial's process may still run; on another machine nobody here can tell."""
    owner = _owner(folder)
    if not owner:
        maker = folder.name.split(".")[1:2]
        return bool(maker and maker[0].isdigit() and _began(int(maker[0])) >= 0)
    if owner.get("machine") != machine():
        return True
    return bool(_began(owner["pid"]) == owner["began"])


def remove_left() -> None:
    """Remove what is left of trials that were killed."""
    for folder in left():
        remove(folder)


def remove(folder: Path) -> None:
    """Remove a trial's folder with its temporary files, whatever rights the script gave them."""
    temporary = _owner(folder).get("temporary", "")
    # Only what this room has made: a file can be damaged.
    if Path(temporary).name.startswith("flatout-") and Path(temporary).is_dir():
        remove_tree(Path(temporary))
    remove_tree(folder)


def remove_tree(folder: Path) -> None:
    """Remove a folder, whatever rights a script gave what lies in it."""
    for path, folders, _ in os.walk(folder):
        for name in folders:
            one = os.path.join(path, name)
            if not os.path.islink(one):
                with suppress(OSError):
                    os.chmod(one, 0o700)
    shutil.rmtree(folder, ignore_errors=True)


def _owner(folder: Path) -> dict[str, Any]:
    try:
        found = json.loads((folder / "owner.json").read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _began(pid: int) -> int:
    """When a process was started, in the kernel's ticks: tells it from a later one of its pid."""
    found = state_and_start(pid)
    return -1 if found is None or found[0] in "ZX" else found[1]
