"""Errors and long waits of the workers of torch DataLoaders, in words for the user."""

from __future__ import annotations

import errno
import os
import re
import signal
import sys
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from threading import Event, Thread, get_ident
from typing import Any

from torch._C import _remove_worker_pids
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

from flatout.console import say_as_is
from flatout.data.workers.waiting import Waiting, WaitStopped
from flatout.devices import read_shm
from flatout.errors import DataError
from flatout.measure import available_bytes
from flatout.words import memory_words
from flatout.world import place, process_state

# Seconds of waiting before a line is printed; to start a worker or make a batch takes time.
_PATIENCE_S = 15.0
# Seconds between checks for a signal, which ends the wait.
_LOOK_S = 1.0
# Bytes that are read at a time from the pipe of a worker that is starting.
_PIECE = 1 << 20
_END = object()


class Watched:
    """One pass over a DataLoader with workers. A line names the worker that the pass waits for.

    A signal that stops the training, or an exception from a signal handler, ends the wait and all
    workers. Suspended workers are ended, too, because Python waits for them at its exit.

    A separate thread checks the wait. The waiting thread may be inside torch, where it requests the
    memory of a batch from a worker and heeds no signal until that worker answers.

    Args:
        patience_s: seconds of waiting before the first line about the wait.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        patience_s: float = _PATIENCE_S,
        say: Callable[[str], None] = say_as_is,
    ) -> None:
        here = place()
        who = f"rank {here.rank} " if here.world_size > 1 else ""
        self._loader, self._patience_s = loader, patience_s
        self._say = lambda line: say(who + line)
        self._batches: Any = None
        self._wait: Waiting | None = None
        self._stopped: WaitStopped | None = None
        self._thread = get_ident()
        # The local variables of multiprocessing's function that is starting a worker.
        self._start: dict[str, Any] = {}
        self._is_over = Event()

    @property
    def workers(self) -> list[Any]:
        return list(getattr(self._batches, "_workers", ()))

    def batches(self) -> Generator[Any, None, None]:
        """Yield the batches of the loader.

        Raises:
            WaitStopped: a signal has stopped the training.
        """
        self._thread = get_ident()
        thread = Thread(target=self._look, name="flatout-workers", daemon=True)
        thread.start()
        try:
            yield from self._read()
        except GeneratorExit:
            raise
        except BaseException as error:
            has_timed_out = self._loader.timeout and isinstance(error, RuntimeError)
            is_stop = isinstance(error, WaitStopped) or not isinstance(error, Exception)
            if is_stop or has_timed_out:
                self._end_workers()
                self._loader._iterator = None  # a later pass needs new workers
                if self._batches is not None and not hasattr(self._batches, "_workers_status"):
                    self._batches._shutdown = True  # torch cannot end an iterator that is half made
            raise
        finally:
            self._is_over.set()
            thread.join()

    def _read(self) -> Generator[Any, None, None]:
        with self._waiting(self._words_of_start):
            self._batches = batches = iter(self._loader)
        self._start = {}
        if not self._loader.timeout:
            # torch checks its workers every 5 seconds: check more often.
            ask = partial(type(batches)._try_get_data, weakref.proxy(batches), _LOOK_S)  # type: ignore[attr-defined]
            batches._try_get_data = ask  # type: ignore[attr-defined]
        while True:
            with self._waiting(self._words):
                value = next(batches, _END)
            if value is _END:
                return
            yield value

    @contextmanager
    def _waiting(self, what: Callable[[], str]) -> Iterator[None]:
        self._wait = Waiting(what, self._say, self._patience_s)
        try:
            yield
        except Exception:
            # Ended workers raise various errors: report the stop in their place.
            if self._stopped is None:
                raise
        finally:
            self._wait = None
        if self._stopped is not None:
            raise self._stopped

    def _look(self) -> None:
        while not self._is_over.wait(min(_LOOK_S, self._patience_s)):
            wait = self._wait
            self._find_start()
            try:
                if wait is not None:
                    wait.look()
            except WaitStopped as stopped:
                self._stopped = stopped
                self._end_workers()
                break
        while self._start and not self._is_over.wait(_LOOK_S / 10):
            self._find_start()
            self._end_workers()

    def _find_start(self) -> None:
        if self._batches is not None and not self._start:
            return
        frame, start = sys._current_frames().get(self._thread), {}
        while frame is not None:
            # A start by fork has no such data, and writes nothing to the worker.
            if frame.f_code.co_name == "_launch" and "prep_data" in frame.f_locals:
                start = frame.f_locals
            if start and isinstance(frame.f_locals.get("self"), _BaseDataLoaderIter):
                self._batches, self._start = frame.f_locals["self"], start
            frame = frame.f_back

    def _words_of_start(self) -> str:
        words = "the workers of a DataLoader to start"
        if not self._start:
            return words
        words += f": worker {len(self.workers)} imports the script and unpickles the dataset"
        pid = getattr(self._start["self"], "pid", None)  # a fork server sets it later
        if pid is None:
            return words
        return (
            f"{words}; it is process {pid}, which {process_state(pid)}; `py-spy dump --pid {pid}` "
            "prints where it is"
        )

    def _words(self) -> str:
        batches = self._batches
        task = batches._task_info.get(batches._rcvd_idx)
        numbers = range(len(batches._workers)) if task is None else task[:1]
        pids = [batches._workers[number].pid for number in numbers]
        named = ", ".join(
            f"worker {number} (pid {pid}), which {process_state(pid)}"
            for number, pid in zip(numbers, pids, strict=True)
        )
        return (
            f"a batch of a DataLoader by {named}; `py-spy dump --pid {pids[0]}` prints where it "
            "is, and DataLoader(timeout=...) limits the wait"
        )

    def _end_workers(self) -> None:
        """End the workers at once. torch would wait seconds for each, and for suspended workers."""
        if getattr(self._batches, "_worker_pids_set", False):
            # torch would report the end of the workers as a failure.
            self._batches._worker_pids_set = False
            _remove_worker_pids(id(self._batches))
        for worker in self.workers:
            worker.terminate()
            with suppress(ProcessLookupError):
                os.kill(worker.pid, signal.SIGCONT)
        if self._start:
            self._end_start()

    def _end_start(self) -> None:
        """End a worker that does not read its dataset, and free the thread that writes it.

        The pipe to the worker is full. This process keeps both ends of the pipe open, so that the
        worker's end does not wake the thread.
        """
        pid = getattr(self._start["self"], "pid", None)
        pipe = self._start.get("parent_w", self._start.get("w"))
        with suppress(OSError):
            if pid is not None:
                os.kill(pid, signal.SIGKILL)
            reader = os.open(f"/proc/self/fd/{pipe}", os.O_RDONLY | os.O_NONBLOCK)
            with open(reader, "rb", buffering=0) as content:
                while content.read(_PIECE):
                    pass


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
