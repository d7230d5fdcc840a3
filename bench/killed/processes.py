"""Forked processes that are killed, and those of theirs that must end with them.

One process imports torch and forks, so that a kill costs a fraction of a second. It must run no
parallel operation and start no thread: neither survives a fork.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from flatout.processes import die_with_parent

# After this long something hangs: on a busy machine the slowest of all takes a fifth of it.
PATIENCE_S = 180.0
# In this time all processes of one that was killed must have ended.
GONE_S = 10.0

FILE_OPERATIONS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate"}

Tell = Callable[[str], None]


class Lost(Exception):
    """Something is gone, damaged or wrong."""


class Hang(Exception):
    """Something neither ended nor went on."""


class Child:
    """A forked process that works in a folder; what it prints goes to the file `said` there.

    Args:
        work: what it does; it gets what tells lines to this process.
        folder: where; caches and temporary files of Flatout go there as well.
        dies_at: it kills itself before this operation on a file in the folder, counted from 0.
        environment: variables that it gets.
    """

    def __init__(
        self,
        work: Callable[[Tell], object],
        folder: Path,
        dies_at: int | None = None,
        environment: dict[str, str] | None = None,
    ) -> None:
        self._said = folder / "said"
        self._read = b""
        self.code: int | None = None
        self._pipe, writing = os.pipe()
        os.set_blocking(self._pipe, False)
        parent = os.getpid()
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            die_with_parent(parent)
            os.close(self._pipe)
            _be(work, folder, dies_at, {**own_places(folder), **(environment or {})}, writing)
        os.close(writing)

    def lines(self) -> list[str]:
        """The whole lines that it has told so far."""
        self.ended()
        return [line.decode() for line in self._read.split(b"\n")[:-1]]

    def ended(self) -> bool:
        if self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self._listen()
            if pid:
                self.code = os.waitstatus_to_exitcode(status)
                os.close(self._pipe)
        return self.code is not None

    def _listen(self) -> None:
        with suppress(BlockingIOError):
            while read := os.read(self._pipe, 1 << 16):
                self._read += read

    def kill(self) -> None:
        if not self.ended():
            os.kill(self.pid, signal.SIGKILL)

    def wait(self, what: str = "") -> int:
        """Its exit code.

        Raises:
            Hang: it does not end.
        """
        try:
            until(self.ended, f"{what}: process {self.pid} does not end")
        except Hang as hang:
            words = stacks(self.pid)
            self.kill()
            until(self.ended, "not even by SIGKILL")
            raise Hang(f"{hang}\n{words}\n{self.last_words()}") from None
        assert self.code is not None
        return self.code

    def last_words(self) -> str:
        return last_words(self._said)


def last_words(said: Path) -> str:
    try:
        return said.read_text(errors="replace")[-3000:]
    except OSError:
        return ""


def own_places(folder: Path) -> dict[str, str]:
    """Variables by which all that Flatout keeps or writes for a while lies in a folder."""
    temporary = folder / "temporary"
    temporary.mkdir(exist_ok=True)
    return {
        "FLATOUT_CACHE": str(folder / "cache"),
        "TMPDIR": str(temporary),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "torch"),  # torch's own, which stays
    }


def _be(
    work: Callable[[Tell], object],
    folder: Path,
    dies_at: int | None,
    environment: dict[str, str],
    writing: int,
) -> None:
    """Work, and end as a program does: threads are waited for, and what is to be tidied is."""
    code = 70
    said = os.open(folder / "said", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(said, 1)
    os.dup2(said, 2)
    os.environ.update(environment)
    tempfile.tempdir = None

    def tell(line: str) -> None:
        os.write(writing, f"{line}\n".encode())

    try:
        operations = _count_operations(str(folder), dies_at)
        work(tell)
        code = 0
        tell(f"operations {operations()}")
    except SystemExit as asked:
        code = asked.code if isinstance(asked.code, int) else int(asked.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        try:
            threading._shutdown()
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code)


def _count_operations(folder: str, dies_at: int | None) -> Callable[[], int]:
    seen = 0

    def hook(event: str, given: tuple[object, ...]) -> None:
        nonlocal seen
        if event in FILE_OPERATIONS and not _is_elsewhere(given[0], folder):
            if seen == dies_at:
                os.kill(os.getpid(), signal.SIGKILL)
            seen += 1

    sys.addaudithook(hook)
    return lambda: seen


def _is_elsewhere(path: object, folder: str) -> bool:
    words = str(path)
    return words.startswith("/") and not words.startswith(folder)


def until(condition: Callable[[], object], what: str, patience_s: float = PATIENCE_S) -> None:
    """Return once a condition holds.

    Raises:
        Hang: it does not come to hold.
    """
    give_up = time.monotonic() + patience_s
    while not condition():
        if time.monotonic() > give_up:
            raise Hang(f"{what} within {patience_s:.0f} s")
        time.sleep(0.0003)


def descendants(but: Sequence[int] = ()) -> list[psutil.Process]:
    """Living processes below this one, which also adopts what they leave."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if process.pid in but:
                continue
            if process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
            elif process.ppid() == os.getpid():
                os.waitpid(process.pid, os.WNOHANG)
        except (psutil.Error, ChildProcessError):
            continue
    return found


def strays(but: Sequence[int] = ()) -> list[str]:
    """What still lives and should not, in words; it is ended."""
    try:
        until(lambda: not descendants(but), "processes do not end", GONE_S)
    except Hang:
        found = []
        for process in descendants(but):
            try:
                found.append(f"{process.pid} {' '.join(process.cmdline())[:200]}")
                process.kill()
            except psutil.Error:
                continue
        return found
    return []


def stacks(pid: int) -> str:
    """Where a process stands, as far as the kernel tells."""
    words = []
    for thread in sorted(Path(f"/proc/{pid}/task").glob("*")):
        try:
            words.append(
                f"{(thread / 'comm').read_text().strip()} {(thread / 'wchan').read_text()}"
            )
        except OSError:
            continue
    return ", ".join(words)
