"""Files that are whole or as they were before, at any instant: written beside, then renamed."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from flatout import unfinished


@contextmanager
def atomic_write(
    path: str | os.PathLike[str],
    mode: str = "w",
    *,
    durable: bool = False,
    opener: Callable[[str, int], int] | None = None,
    draft: str | None = None,
) -> Iterator[IO[Any]]:
    """A file to write, which replaces the one at `path` when the block ends without an error.

    Args:
        path: of the file; text is in UTF-8.
        mode: "w", or "wb" for bytes.
        durable: whether it lasts through a power cut: the file and the folder are flushed.
        opener: as `open` takes it.
        draft: what the file is called while it is written, if its writer cleans up after a kill;
            otherwise no other writer has the name, and `unfinished` knows it.

    Raises:
        OSError: it cannot be written.
    """
    beside = Path(path).with_name(draft or unfinished.new_name())
    encoding = None if "b" in mode else "utf-8"
    try:
        with open(beside, mode, encoding=encoding, opener=opener) as file:
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


def flush_folder(folder: Path) -> None:
    """Make renames in a folder last through a power cut."""
    number = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(number)
    except OSError as error:
        # Some network and FUSE file systems know no fsync for folders.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS):
            raise
    finally:
        os.close(number)
