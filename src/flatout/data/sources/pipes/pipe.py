"""Pipes: opened without blocking, locked against a second reader, read in large pieces.

A FIFO is opened without waiting for its writer, so that a line can name the FIFO that is waited
for. On Linux, `poll` shows whether a FIFO has not had a writer yet or whether its writers have gone
(pipe(7)); a `read` of 0 bytes shows neither.
"""

from __future__ import annotations

import fcntl
import os
import select
import stat
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from flatout.console import say_as_is
from flatout.data.workers.waiting import Waiting
from flatout.errors import DataError, as_data_error

# Path that means standard input.
STANDARD_INPUT = "-"
# Bytes that a pipe may hold, where Linux allows, so that its writer continues while rows are
# decoded.
CAPACITY = 1 << 20

# Seconds between two checks whether `stop` was called.
_SLICE_S = 0.1
# Seconds after which bytes are returned, however few they are.
_MOMENT_S = 0.05

# Standard input belongs to the process, and can be read only once.
_standard_input_was_read = threading.Event()


class Pipe:
    """One pass over a FIFO or over standard input. One thread reads; any thread may call `stop`.

    Args:
        path: the FIFO, or "-" for standard input.
        turn: number of the pass.
        timeout_s: longest time without a byte; None waits forever.
        say: prints a line for the user.
        first_word_s: seconds of waiting before a first line about the wait.
    """

    def __init__(
        self,
        path: str,
        turn: int = 0,
        *,
        timeout_s: float | None = None,
        say: Callable[[str], None] = say_as_is,
        first_word_s: float = 5.0,
    ) -> None:
        self.name = "standard input" if path == STANDARD_INPUT else path
        self._path, self._turn = path, turn
        self._timeout_s, self._say, self._first_word_s = timeout_s, say, first_word_s
        self._stopped = threading.Event()
        self._number: int | None = None
        self._poll = select.poll()
        self._never_blocks = False
        self._begun = self._at_end = self._has_writer = False

    def open(self) -> None:
        """Open the pipe and lock out other readers; wait for a FIFO that does not exist yet."""
        if self._path == STANDARD_INPUT:
            self._number = self._open_standard_input()
        else:
            self._number = self._open_fifo()
        self._poll.register(self._number, select.POLLIN)
        if stat.S_ISFIFO(os.fstat(self._number).st_mode):
            self._lock(self._number)
            # If the system does not allow this size, the pipe keeps its size.
            with suppress(OSError):
                fcntl.fcntl(self._number, fcntl.F_SETPIPE_SZ, CAPACITY)

    def read_into(self, room: memoryview) -> int:
        """Fill `room`, or a part of it if no bytes come for a moment; return 0 at the end."""
        got, until = 0, 0.0
        while got < len(room) and not self._at_end:
            if got == 0:
                count = self._first(room)
                until = time.monotonic() + _MOMENT_S
            else:
                come = self._read(room[got:], max(0.0, until - time.monotonic()))
                if come is None:
                    break
                count = come
            if count == 0:
                # Closed at once: the next writer must not find a reader that is about to close.
                self._at_end = True
                self.close()
            got += count
        return got

    def stop(self) -> None:
        self._stopped.set()

    def close(self) -> None:
        number, self._number = self._number, None
        if number is not None:
            # A process that was forked since holds the lock as well, until it is released.
            with suppress(OSError):
                fcntl.flock(number, fcntl.LOCK_UN)
            os.close(number)

    # -- opening -----------------------------------------------------------------------------

    def _open_standard_input(self) -> int:
        if _standard_input_was_read.is_set():
            raise DataError(
                "standard input can be read once, and it was",
                do="for several epochs write to a FIFO (mkfifo) once per epoch, or read files",
            )
        try:
            if stat.S_ISFIFO(os.fstat(0).st_mode):
                # Opened again: processes that share descriptor 0 would share its lock.
                with suppress(OSError):
                    number = os.open("/proc/self/fd/0", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
                    self._never_blocks = True
                    return number
            return os.dup(0)
        except OSError as error:
            raise DataError(f"standard input cannot be read: {error.strerror}") from error
        finally:
            _standard_input_was_read.set()

    def _open_fifo(self) -> int:
        folder = os.path.dirname(self._path) or "."
        if not os.path.isdir(folder):
            raise DataError(f"there is no folder {folder!r}", where=self._path)
        place: str | None = None

        def is_there() -> bool:
            nonlocal place
            place = self._place()
            return place is not None or self._stopped.wait(_SLICE_S)

        self._wait(is_there, lambda: f"a FIFO {self._path} or {self._path}_{self._turn}")
        assert place is not None
        self.name = place
        with as_data_error("cannot be opened", place):
            number = os.open(place, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        self._never_blocks = True
        return number

    def _place(self) -> str | None:
        other = None
        for place in (self._path, f"{self._path}_{self._turn}"):
            try:
                mode = os.stat(place).st_mode
            except FileNotFoundError:
                continue
            except OSError as error:
                raise DataError(f"cannot be opened: {error.strerror}", where=place) from error
            if stat.S_ISFIFO(mode):
                return place
            other = "folder" if stat.S_ISDIR(mode) else "file"
        if other is not None:
            raise DataError(
                f"expected a FIFO, found a {other}",
                where=self._path,
                do="read files by their format, such as flatout.data.libsvm(path)",
            )
        return None

    def _lock(self, number: int) -> None:
        """Lock out other readers: two readers would each get a part of the bytes."""
        try:
            fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            reader = _holder(number)
            self._number = None
            os.close(number)
            raise DataError(
                f"the pipe is being read already, by {reader}: two readers would tear its records "
                "apart",
                where=self.name,
                do="give each worker its own pipe, or end the other reader",
            ) from None
        except OSError:  # the file system has no locks
            pass

    # -- waiting and reading -----------------------------------------------------------------

    def _first(self, room: memoryview) -> int:
        come: int | None = None

        def has_come() -> bool:
            nonlocal come
            come = self._read(room, _SLICE_S)
            return come is not None

        self._wait(has_come, self._what_is_missing)
        assert come is not None
        return come

    def _read(self, room: memoryview, wait_s: float) -> int | None:
        assert self._number is not None
        events = self._poll.poll(wait_s * 1000)
        if not events and not self._never_blocks:
            return None
        try:
            count = os.readv(self._number, [room])
        except BlockingIOError:
            self._has_writer = True
            return None
        except OSError as error:
            raise DataError(f"cannot be read: {error.strerror}", where=self.name) from error
        if count == 0 and not events and not self._begun:
            return None  # no writer has opened it yet
        self._begun = True
        return count

    def _what_is_missing(self) -> str:
        if self._path == STANDARD_INPUT:
            return "bytes on standard input"
        if self._begun:
            return f"more bytes: the writer of {self.name} is silent"
        if self._has_writer:
            return f"the first bytes: {self.name} has a writer, which is silent"
        again = f" again, for pass {self._turn + 1}" if self._turn and not self._numbered else ""
        return f"a writer: no one has opened {self.name} to write{again}"

    @property
    def _numbered(self) -> bool:
        return self.name != self._path

    def _wait(self, ready: Callable[[], bool], what: Callable[[], str]) -> None:
        """Return once `ready`, which takes a moment to answer; print what is waited for."""
        waiting = Waiting(what, self._say, self._first_word_s)
        while not ready() or self._stopped.is_set():
            if self._stopped.is_set():
                raise DataError("the pipe was closed while it was being read", where=self.name)
            if self._timeout_s is not None and waiting.seconds >= self._timeout_s:
                raise DataError(
                    f"nothing came in {self._timeout_s:g} s; waited for {what()}",
                    where=self.name,
                    do="start the writer, or raise timeout_s",
                )
            waiting.look()


def _holder(number: int) -> str:
    status = os.fstat(number)
    device = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    with suppress(OSError), open("/proc/locks") as locks:
        for line in locks:
            fields = line.split()
            if len(fields) > 5 and fields[1] == "FLOCK" and fields[5] == device:
                own = " (this one)" if int(fields[4]) == os.getpid() else ""
                return f"process {fields[4]}{own}"
    return "another process"
