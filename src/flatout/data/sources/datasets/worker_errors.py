"""Errors that end a torch DataLoader's workers, in words for the user."""

from __future__ import annotations

import errno
import re
import signal
from collections.abc import Generator, Iterable
from typing import Any

from torch.utils.data import DataLoader

from flatout.data.sources.datasets.silent_workers import Watched
from flatout.devices import read_shm
from flatout.errors import DataError
from flatout.measure import available_bytes
from flatout.words import memory_words

# torch's messages when a worker could not return a batch: a SIGBUS in the worker, or an error.
_KILLED = re.compile(r"DataLoader worker \(pid (\d+)\) is killed by signal: (\w+)")
_NO_ROOM = ("Bus error", "No space left on device", "unable to allocate shared memory")


def named_faults(loader: DataLoader[Any], **options: Any) -> Generator[Any, None, None]:
    """Yield the batches of a DataLoader. A line names a worker after a long wait for it.

    Args:
        loader: a DataLoader of the user or of Flatout.
        options: options of `Watched`.

    Raises:
        DataError: /dev/shm is too small for the batches of the loader's workers, or a worker
            was killed.
        WaitStopped: a signal has stopped the training.
    """
    if not loader.num_workers:
        yield from loader
        return
    watched = Watched(loader, **options)
    try:
        yield from watched.batches()
    except (RuntimeError, OSError, EOFError) as error:
        refuse_small_shm(error)
        refuse_dead_worker(error, watched.workers)
        raise


def refuse_dead_worker(error: BaseException, workers: Iterable[Any] = ()) -> None:
    """Raise a DataError if an error means that a worker of a DataLoader was killed.

    Args:
        error: the raised error; torch may raise it anywhere in the process that lost the worker.
        workers: processes of the loader, if they are known.

    Raises:
        DataError: a worker was killed; the message names the signal.
    """
    match = _KILLED.search(str(error)) if isinstance(error, RuntimeError) else None
    pid, killed = (match[1], match[2]) if match else ("", "")
    for worker in workers:
        code = worker.exitcode or 0
        if code < 0 and code != -signal.SIGTERM:  # torch itself ends workers by SIGTERM
            pid, killed = str(worker.pid), signal.Signals(-code).name
    if not killed:
        return
    words = f"a worker of the DataLoader (process {pid}) was killed by {killed}"
    if killed not in ("Killed", "SIGKILL"):
        raise DataError(words, do="read the output of the worker") from error
    raise DataError(
        f"{words.replace('Killed', 'SIGKILL')}, as the kernel does when memory runs out: "
        f"{memory_words(available_bytes())} of memory are free now",
        do="use fewer workers (num_workers=), a smaller prefetch_factor= or smaller batches; "
        "`dmesg` shows whether the kernel killed it",
    ) from error


def refuse_small_shm(error: Exception) -> None:
    """Raise a DataError if an error means that /dev/shm has no room."""
    shm = read_shm()
    is_full = isinstance(error, OSError) and error.errno == errno.ENOSPC
    # Another full disk, to which a dataset writes, may also cause this error.
    if is_full and shm is not None and not shm.too_small_for_workers:
        return
    by_words = isinstance(error, RuntimeError) and any(w in str(error) for w in _NO_ROOM)
    if not (is_full or by_words):
        return
    size = "there is none"
    if shm is not None:
        size = f"it has {memory_words(shm.total)}, of which {memory_words(shm.free)} are free"
    raise DataError(
        f"/dev/shm, through which loader workers hand over their batches, is too small: {size}",
        do="enlarge it (docker run --shm-size=2g), or use fewer workers or smaller batches",
    ) from error
