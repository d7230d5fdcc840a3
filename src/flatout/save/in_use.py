"""Lock that lets only one job use a run folder. The kernel releases it when the process ends."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import stat
from contextlib import suppress
from pathlib import Path

from flatout.errors import CheckpointError

# Name of the lock file in a run folder.
_NAME = ".in-use"
# O_NOFOLLOW: another user with write access may have replaced the lock file with a link.
_FLAGS = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
# Error codes of file systems that do not support locks.
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)


class InUse:
    """Locks a local folder for this process, until `release` or the end of the process.

    The lock belongs to the process, not to the open file, so forked children do not hold it. On a
    file system without locks, the folder is not locked.

    Args:
        folder: path of the folder; created if missing.

    Raises:
        CheckpointError: another process has locked the folder (the error names the process), or
            the lock file is no regular file.
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
                with suppress(OSError):  # on a full disk, the lock works without its holder's name
                    os.truncate(file, 0)
                    os.pwrite(file, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
                return file
            os.close(file)  # the earlier holder has just removed this lock file: try again

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
        """Whether the folder was removed or created again since it was locked."""
        return self._file is not None and not self._is_there(self._file)

    def release(self) -> None:
        """Release the lock and remove the lock file."""
        file, self._file = self._file, None
        if file is None:
            return
        if self._is_there(file):
            with suppress(OSError):
                self._path.unlink()
        os.close(file)
