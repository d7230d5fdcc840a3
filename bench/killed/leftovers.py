"""What a series of kills has left in its folder, and in shared memory, that nothing will use."""

from __future__ import annotations

import os
import re
from pathlib import Path

import psutil

from flatout.unfinished import is_unfinished

_NAMES = re.compile(r".*\.(part|old|lock|tmp)|filled\.log|begun\.json|settings\.json|tmp.*")
# Of one process, in the cache: what `flatout top` shows, and rows that nothing names exactly.
_OF_PROCESS = re.compile(r"(\d+)(-[0-9a-f]{16}|\.json)")


def leftovers(folder: Path) -> list[str]:
    """Paths in the folder of what is unfinished, or of processes that have ended."""
    found = []
    for place, folders, files in os.walk(folder):
        inside = Path(place)
        for name in [*folders, *files]:
            owner = _OF_PROCESS.fullmatch(name)
            is_dead = owner is not None and not psutil.pid_exists(int(owner[1]))
            if is_unfinished(name) or _NAMES.fullmatch(name) or is_dead:
                found.append(str((inside / name).relative_to(folder)))
        if inside.name.startswith("step-") and not folders and not files:
            found.append(f"{inside.relative_to(folder)} (empty)")
    found += [f"temporary/{name}" for name in os.listdir(folder / "temporary")]
    return sorted(found)


def shared_memory() -> set[str]:
    """Names in shared memory of this user's."""
    found = set()
    for entry in os.scandir("/dev/shm"):
        try:
            if entry.stat(follow_symlinks=False).st_uid == os.geteuid():
                found.add(entry.name)
        except OSError:
            continue
    return found


def still_there(names: set[str]) -> list[str]:
    """Those names in shared memory that no living process has open or mapped."""
    used = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "maps").read_text(errors="replace")
            for descriptor in (process / "fd").iterdir():
                words += os.readlink(descriptor) + "\n"
        except OSError:
            continue
        used |= {name for name in names if f"/dev/shm/{name}" in words}
    return sorted(name for name in names - used if os.path.exists(f"/dev/shm/{name}"))
