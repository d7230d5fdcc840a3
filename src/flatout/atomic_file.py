"""Files that are whole or unchanged at any instant: written under another name, then renamed."""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from flatout import unfinished

# Names under which the kernel shows the open files of a process.
_OPEN_FILE = re.compile(r"/dev/(fd/|stdout$|stderr$)|/proc/[^/]+/fd/")


@contextmanager
def atomic_write(
    path: str | os.PathLike[str],
    mode: str = "w",
    *,
    durable: bool = False,
    opener: Callable[[str, int], int] | None = None,
    draft: str | None = None,
) -> Iterator[IO[Any]]:
    """Yield a file to write, which replaces the one at `path` if the block ends without an error.

    A symbolic link at `path` is replaced, and its target stays as it is. A character device, or a
    pipe of a shell such as /dev/fd/63, is not replaced: the data is written into it.

    Args:
        path: path of the file; text is in UTF-8.
        mode: "w", or "wb" for bytes.
        durable: whether to flush the file and the folder, so that they survive a power cut.
        opener: as for `open`.
        draft: the name of the file while it is written, if its writer cleans up after a kill; by
            default a name that no other writer has, and `unfinished` knows.

    Raises:
        OSError: the file cannot be written, or `path` is a block device, such as a disk.
    """
    if _is_device(path):
        with open(path, mode, encoding=None if "b" in mode else "utf-8") as file:
            yield file
        return
    beside = Path(path).with_name(draft or unfinished.new_name())
    encoding = None if "b" in mode else "utf-8"
    try:
        # Another user may have put a symbolic link at a draft's name: O_NOFOLLOW refuses it.
        make = opener or _open_for_all
        with open(
            beside, mode, encoding=encoding, opener=lambda p, f: make(p, f | os.O_NOFOLLOW)
        ) as file:
            yield file
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(beside, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(beside)
        raise
    if durable:
        flush_folder(beside.parent)


def private(path: str, flags: int) -> int:
    """Open a file as an `opener`; a new file gets mode 0600, so that only its user can read it."""
    return os.open(path, flags, 0o600)


def _open_for_all(path: str, flags: int) -> int:
    return os.open(path, flags, 0o666)


def _is_device(path: str | os.PathLike[str]) -> bool:
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return False
    if stat.S_ISBLK(mode):
        raise OSError(errno.EPERM, "a block device is not written", os.fspath(path))
    return stat.S_ISCHR(mode) or _OPEN_FILE.match(os.path.abspath(path)) is not None


def flush_folder(folder: Path) -> None:
    """Flush renames in a folder, so that they survive a power cut."""
    number = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(number)
    except OSError as error:
        # Some network and FUSE file systems have no fsync for folders.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS):
            raise
    finally:
        os.close(number)
