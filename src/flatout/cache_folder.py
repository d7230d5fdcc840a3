"""Where what can be made again is kept: `FLATOUT_CACHE`, or `flatout` in the user's caches.

A folder in it for each kind, private to the user. Each holds a mark that says who made it, since
`FLATOUT_CACHE` may name a folder in which the user keeps files too: only what lies in a marked
folder is ever removed, and through handles, so that no link leads elsewhere.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from flatout import unfinished

MARK = ".made-by-flatout"
_FOLDER = os.O_DIRECTORY | os.O_NOFOLLOW


def cache_folder() -> Path:
    """The folder; it need not exist yet."""
    own = os.environ.get("FLATOUT_CACHE")
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(own) if own else Path(base) / "flatout"


def kind_folder(kind: str) -> Path:
    """The folder of one kind, such as "index", made and marked where it is not there or empty.

    What processes that are gone have left in it, by a name of `unfinished.new_name()`, is removed.

    Raises:
        OSError: it cannot be made.
    """
    base = cache_folder()
    base.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder = base / kind
    folder.mkdir(mode=0o700, exist_ok=True)
    if is_made(folder) and stat.S_IMODE(folder.stat().st_mode) & 0o077:
        folder.chmod(0o700)
    inside = os.listdir(folder)
    if not folder.is_symlink() and not inside:
        with suppress(FileExistsError):  # another process of the user's has just done it
            (folder / MARK).touch(mode=0o600, exist_ok=False)
    for name in filter(unfinished.is_abandoned, inside):
        remove(folder / name)
    return folder


def private(path: str, flags: int) -> int:
    """Open a file, made where it is not there, so that its user alone may read it: an `opener`."""
    return os.open(path, flags, 0o600)


def is_made(folder: Path) -> bool:
    """Whether `kind_folder` has made this folder, for this user: a link to one has not been."""
    with suppress(OSError), _opened(folder) as handle:
        return _is_marked(handle)
    return False


def remove(path: Path) -> None:
    """Remove a file, link or folder that lies directly in a folder that `kind_folder` has made.

    What lies elsewhere stays, as does what cannot be removed.
    """
    with suppress(OSError), _opened(path.parent) as handle:
        if _is_marked(handle):
            remove_at(path.name, handle)


def remove_at(name: str, folder: int) -> None:
    """Remove a file, a link, or a folder with all that is in it, whatever its rights.

    It goes from handle to handle: no link is followed, and what is mounted within stays.

    Args:
        name: within the folder.
        folder: an open descriptor of it.
    """
    try:
        descriptor = os.open(name, getattr(os, "O_PATH", os.O_RDONLY) | _FOLDER, dir_fd=folder)
    except OSError:  # no folder
        with suppress(OSError):
            os.unlink(name, dir_fd=folder)
        return
    try:
        if os.fstat(descriptor).st_dev != os.fstat(folder).st_dev:
            return
        with suppress(OSError):
            os.chmod(f"/proc/self/fd/{descriptor}", 0o700)
        with suppress(OSError):
            inside = os.open(".", os.O_RDONLY | os.O_DIRECTORY, dir_fd=descriptor)
            try:
                for each in os.listdir(inside):
                    remove_at(each, inside)
            finally:
                os.close(inside)
    finally:
        os.close(descriptor)
    with suppress(OSError):
        os.rmdir(name, dir_fd=folder)


@contextmanager
def _opened(folder: Path) -> Iterator[int]:
    handle = os.open(folder, os.O_RDONLY | _FOLDER)
    try:
        yield handle
    finally:
        os.close(handle)


def _is_marked(handle: int) -> bool:
    try:
        mark = os.stat(MARK, dir_fd=handle, follow_symlinks=False)
    except OSError:
        return False
    return stat.S_ISREG(mark.st_mode) and mark.st_uid == os.fstat(handle).st_uid == os.geteuid()
