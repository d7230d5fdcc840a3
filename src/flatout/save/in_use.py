"""One live job in a run folder: a lock that the kernel takes back when its process ends."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import stat
from contextlib import suppress
from pathlib import Path

from flatout.errors import CheckpointError

_NAME = ".in-use"
# Who else writes into the folder may have put a link there, which leads to any file of this user's.
_FLAGS = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
# What a file system without locks answers.
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)


class InUse:
    """Holds a local folder for this process, until `release` or its end.

    A lock of the process, not of the open file: children that are forked meanwhile do not hold it.
    Where the file system has no locks, nothing is held.

    Args:
        folder: is made if it is not there.

    Raises:
        CheckpointError: a job of another process holds it, which is named; or what its lock would
            be is no plain file.
    """

    def __init__(self, folder: str) -> None:
        self._path = Path(folder) / _NAME
        self._file: int | None = self._take()

    def _take(self) -> int | None:
        while True:
            try:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                file = os.open(self._path, _FLAGS, 0o644)
            except OSError as error:
                if self._path.is_symlink():
                    raise self._no_file() from error
                raise CheckpointError(
                    f"the run folder cannot be written: {error.strerror}",
                    where=str(self._path.parent),
                ) from error
            if not stat.S_ISREG(os.fstat(file).st_mode):
                os.close(file)
                raise self._no_file()
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                holder = os.read(file, 200).decode(errors="replace")
                os.close(file)
                if error.errno in _NO_LOCKS:
                    return None
                raise CheckpointError(
                    f"another job runs in this folder: {ascii(holder)[1:-1] or 'unknown'}",
                    where=str(self._path.parent),
                    do="choose another run folder, or wait until that job has ended",
                ) from error
            if self._is_there(file):
                with suppress(OSError):  # on a full disk the lock holds, and its holder has no name
                    os.truncate(file, 0)
                    os.pwrite(file, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
                return file
            os.close(file)  # its holder has just ended and removed it

    def _no_file(self) -> CheckpointError:
        return CheckpointError(
            f"expected {_NAME} in the run folder to be a plain file",
            where=str(self._path),
            do="see who has put something else there, and remove it",
        )

    def _is_there(self, file: int) -> bool:
        with suppress(OSError):
            return os.path.samestat(os.fstat(file), os.stat(self._path))
        return False

    @property
    def is_gone(self) -> bool:
        """Whether the folder was removed, or made again by another job, since it was taken."""
        return self._file is not None and not self._is_there(self._file)

    def release(self) -> None:
        """Leave the folder to others."""
        file, self._file = self._file, None
        if file is None:
            return
        if self._is_there(file):
            with suppress(OSError):
                self._path.unlink()
        os.close(file)
