"""The cache of reproducible files: `FLATOUT_CACHE`, or `flatout` in the user's caches.

It has a folder for each kind, private to the user. Each of these holds a mark of its creator, since
`FLATOUT_CACHE` may name a folder in which the user keeps files too. Only files in a marked folder
are ever removed, and through handles, so that no link leads elsewhere.

Flatout loads compiled code from the cache. So it refuses a folder that belongs to another user, or
in which another user could put files. It then uses a folder among the temporary files.
"""

from __future__ import annotations

import errno
import grp
import multiprocessing
import os
import pwd
import stat
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from flatout import unfinished
from flatout.atomic_file import atomic_write
from flatout.atomic_file import private as private
from flatout.console import say_once

MARK = ".made-by-flatout"
_FOLDER = os.O_DIRECTORY | os.O_NOFOLLOW
_MOST_LINKS = 40
# No file can be made at this path: for a user who has no folder to write in.
_NOWHERE = Path(os.devnull, "flatout")


def cache_folder() -> Path:
    """Return the cache folder, which need not exist yet.

    If the wanted folder cannot be used, return another one; rank 0 prints the reason once. If no
    folder can be used, return a path that can be neither read nor made: callers go on without it.
    """
    wanted = wanted_folder()
    why = hindrance(wanted)
    if not why:
        return wanted
    other = _NOWHERE
    with suppress(OSError):  # no folder for temporary files exists
        other = Path(tempfile.gettempdir(), f"flatout-{os.geteuid()}")
    if hindrance(other):
        other = _NOWHERE
    if multiprocessing.parent_process() is None and os.environ.get("RANK", "0") == "0":
        instead = "nothing is kept" if other == _NOWHERE else f"{other} is used in its place"
        say_once(
            f"the cache folder {wanted} is not used: {why}; {instead}; do: set FLATOUT_CACHE to a "
            "folder of your own that no other user can write"
        )
    return other


def wanted_folder() -> Path:
    """Return the folder that the user's settings name, even if it cannot be used."""
    own = os.environ.get("FLATOUT_CACHE")
    if own:
        return Path(own)
    base = os.environ.get("XDG_CACHE_HOME")
    with suppress(RuntimeError):  # the user has no home folder
        return Path(base or Path.home() / ".cache") / "flatout"
    return _NOWHERE


def hindrance(folder: Path) -> str:
    """Return why a folder cannot be used as a cache; "" if it can be used.

    An existing folder has to belong to this user. No other user but root may be able to replace it.
    So all folders and symbolic links on its path are inspected, as OpenSSH does for its files.
    """
    path, end = os.path.abspath(folder), os.path.realpath(folder)
    try:
        for at, status in _path_to(path, _MOST_LINKS):
            is_last = at in (path, end) and not stat.S_ISLNK(status.st_mode)
            if why := _other_writer(at, status, is_last=is_last):
                return why
        nearest = next(each for each in (Path(path), *Path(path).parents) if os.path.lexists(each))
    except OSError as error:
        return f"{error.filename} cannot be read ({error.strerror})"
    if not nearest.is_dir():
        return f"{nearest} is no folder"
    if not os.access(nearest, os.W_OK | os.X_OK, effective_ids=True):
        return f"{nearest} cannot be written"
    if os.path.exists(path) and os.stat(path).st_uid != os.geteuid():
        return f"{path} belongs to another user"
    return ""


def _path_to(path: str, links: int) -> Iterator[tuple[str, os.stat_result]]:
    """Yield the existing folders and symbolic links on a path, from the root on."""
    at = ""
    for part in Path(path).parts:
        at = os.path.join(at, part)
        try:
            status = os.lstat(at)
        except (FileNotFoundError, NotADirectoryError):
            return
        yield at, status
        if stat.S_ISLNK(status.st_mode) and links:
            target = os.path.join(os.path.realpath(os.path.dirname(at)), os.readlink(at))
            yield from _path_to(target, links - 1)


def _other_writer(path: str, status: os.stat_result, *, is_last: bool) -> str:
    """Return how another user could change a folder or the target of a link; "" if none can."""
    mode = stat.S_IMODE(status.st_mode)
    owner = status.st_uid
    if owner not in (os.geteuid(), 0) and owner != _owner_of_root_folders():
        return f"{path} belongs to another user"
    if not stat.S_ISDIR(status.st_mode) or (mode & stat.S_ISVTX and not is_last):
        return ""
    if mode & 0o002 or (mode & 0o020 and not _is_own_group(status.st_gid)):
        return f"other users can write {path} (mode {mode:o})"
    return ""


def _is_own_group(number: int) -> bool:
    """Return whether a group is root's, or holds this user alone, as on many systems."""
    with suppress(KeyError):
        user, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(number)
        alone = group.gr_name == user.pw_name and set(group.gr_mem) <= {user.pw_name}
        return number == 0 or (alone and number == user.pw_gid)
    return number == 0


def _owner_of_root_folders() -> int:
    """Return the user that owns root's folders in a user namespace without root; else 0."""
    with suppress(OSError, ValueError):
        users = [line.split() for line in Path("/proc/self/uid_map").read_text().splitlines()]
        if all(first != "0" for first, *_ in users):
            return int(Path("/proc/sys/kernel/overflowuid").read_text())
    return 0


def kind_folder(kind: str) -> Path:
    """Return the folder of one kind, such as "index". Create and mark it if it is missing or empty.

    Files that ended processes have left in it, with a name of `unfinished.new_name()`, are removed.

    Raises:
        OSError: the folder cannot be made, or is not safe to use.
    """
    base = cache_folder()
    base.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder = base / kind
    folder.mkdir(mode=0o700, exist_ok=True)
    if is_made(folder) and stat.S_IMODE(folder.stat().st_mode) & 0o077:
        folder.chmod(0o700)
    # Another user may have made one of these folders a moment before this process.
    if why := hindrance(folder):
        raise PermissionError(errno.EPERM, f"not used as a cache: {why}", str(folder))
    inside = os.listdir(folder)
    if not folder.is_symlink() and not inside:
        with suppress(FileExistsError):  # another process of this user has just done it
            (folder / MARK).touch(mode=0o600, exist_ok=False)
    for name in filter(unfinished.is_abandoned, inside):
        remove(folder / name)
    return folder


def keep_text(kind: str, name: str, text: str) -> None:
    """Write a text to the cache with a checksum in its first line; `kept_text` reads it.

    Raises:
        OSError: the file cannot be written.
    """
    with atomic_write(kind_folder(kind) / name, opener=private) as file:
        file.write(with_checksum(text))


def kept_text(kind: str, name: str) -> str | None:
    """Return a cached text; None if it is missing, damaged, or written by another user."""
    path = cache_folder() / kind / name
    with suppress(OSError, ValueError):
        if not hindrance(path.parent):
            with open(path, encoding="utf-8", newline="", opener=_open_own) as file:
                first, _, text = file.read().partition("\n")
            return text if first == _first_line(text) else None
    return None


def with_checksum(text: str) -> str:
    """Return a text with its checksum line, in the form that `kept_text` reads."""
    return f"{_first_line(text)}\n{text}"


def _first_line(text: str) -> str:
    return f"# crc32 {zlib.crc32(text.encode()):08x} of what follows"


def _open_own(path: str, flags: int) -> int:
    number = os.open(path, flags | os.O_NOFOLLOW)
    if os.fstat(number).st_uid != os.geteuid():
        os.close(number)
        raise PermissionError(errno.EPERM, "it belongs to another user", path)
    return number


def is_made(folder: Path) -> bool:
    """Return whether `kind_folder` has made this folder for this user; False for a link to one."""
    with suppress(OSError), _opened(folder) as handle:
        return _is_marked(handle)
    return False


def remove(path: Path) -> None:
    """Remove a file, link or folder that is directly in a folder that `kind_folder` has made.

    Other paths stay, and so do files that cannot be removed.
    """
    with suppress(OSError), _opened(path.parent) as handle:
        if _is_marked(handle):
            remove_at(path.name, handle)


def remove_at(name: str, folder: int) -> None:
    """Remove a file, a link, or a folder with its content, whatever its rights.

    Works on handles: no link is followed, and file systems mounted within stay.

    Args:
        name: name within the folder.
        folder: an open descriptor of the folder.
    """
    try:
        descriptor = os.open(name, getattr(os, "O_PATH", os.O_RDONLY) | _FOLDER, dir_fd=folder)
    except OSError:  # not a folder
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
