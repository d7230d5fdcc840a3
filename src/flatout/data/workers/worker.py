"""One process that makes batches.

It is spawned, never forked: a fork after a parallel operation hangs in OpenMP. It gets tasks
through its own pipe, of which the parent keeps only one end. So the pipe ends when the process ends
at any moment, and the parent never waits for a dead process.
"""

from __future__ import annotations

import os
import pickle
import signal
import threading
import traceback
from multiprocessing.util import Finalize
from typing import Any

import torch

from flatout.data.batches.batch import Batch
from flatout.data.reading.changed import found_here, take_over
from flatout.data.workers.handing import receive, send
from flatout.data.workers.waiting import Waiting
from flatout.errors import DataError

# Seconds between checks that a silent process is alive; another process may hold its pipe open.
_LOOK_S = 1.0
# Seconds of waiting before the first line. Starting a worker or making a batch may take long.
_FIRST_WORD_S = 15.0
# Seconds to wait for the exit code of a process whose pipe has ended.
_PATIENCE_S = 5.0


class WorkerDied(DataError):
    """A process that makes batches has ended by itself, or could not be started."""


class Worker:
    """A process that makes batches. Only one thread at a time may call it."""

    def __init__(self, payload: bytes, name: str) -> None:
        self._payload, self._name = payload, name
        self.ready = False
        context = torch.multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        # The payload is sent later, through the pipe. `start` writes its arguments into a pipe that
        # it keeps open: with a large argument, the end of the process would not be noticed.
        self._process = context.Process(target=_serve, args=(theirs,), daemon=True)
        try:
            self._process.start()
        except OSError as error:
            raise WorkerDied(
                f"{name} cannot be started: {error.strerror}",
                do="raise the limit of processes or memory, or lower options(processes=...)",
            ) from error
        finally:
            theirs.close()
        # At its exit, Python waits for processes, and a suspended process only obeys SIGKILL.
        Finalize(self, self._process.kill, exitpriority=1)

    @property
    def pid(self) -> int | None:
        return self._process.pid

    def ask(self, task: tuple[Any, ...], what: str) -> Batch:
        """Return the batch of a task; an error names the task `what` if the process dies."""
        doing = what if self.ready else "starting: importing the script and reading its data"
        try:
            if not self.ready:
                self._pipe.send_bytes(self._payload)
                self._payload = b""
                self._receive(doing)
                self.ready, doing = True, what
            self._pipe.send(task)
            made, found, error, trace = self._receive(doing)
        except (EOFError, OSError) as lost:
            raise self._why_it_ended(doing) from lost
        take_over(found)
        if error is not None:
            raise error from _InWorker(trace)
        batch: Batch = made
        return batch

    def _receive(self, doing: str) -> Any:
        words = f"{self._name} (pid {self.pid}), which is {doing}"
        waiting = Waiting(lambda: words, first_s=_FIRST_WORD_S)
        while not self._pipe.poll(_LOOK_S):
            waiting.look()
            if not self._process.is_alive() and not self._pipe.poll():
                raise EOFError
        return receive(self._pipe)

    def _why_it_ended(self, doing: str) -> DataError:
        self._process.join(_PATIENCE_S)
        code = self._process.exitcode
        if code is None:
            return DataError(f"{self._name} (pid {self.pid}) cannot be reached while {doing}")
        how = f"ended with exit code {code}"
        if code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
        why = " (SIGKILL is what running out of memory looks like)" if code == -9 else ""
        return WorkerDied(
            f"{self._name} (pid {self.pid}) {how}{why} while {doing}",
            do="look at what it printed; options(processes=...) sets how many there are",
        )

    def close(self) -> None:
        self._process.kill()
        self._process.join(_PATIENCE_S)


class _InWorker(Exception):
    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def _serve(pipe: Any) -> None:
    threading.Thread(target=_end_with_parent, name="flatout-parent", daemon=True).start()
    # Ctrl-C goes to all processes of a terminal; the parent decides when this process ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    try:
        maker = pickle.loads(pipe.recv_bytes())
        send(pipe, None)
        while True:
            _answer(pipe, maker, pipe.recv())
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return


def _answer(pipe: Any, maker: Any, task: tuple[Any, ...]) -> None:
    try:
        made = maker.seeded(*task)
        send(pipe, (made, found_here(), None, ""))
    except (BrokenPipeError, ConnectionResetError):
        raise
    except Exception as error:
        trace = traceback.format_exc()
        send(pipe, (None, {}, _sendable(error, trace), trace))


def _sendable(error: Exception, trace: str) -> Exception:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return DataError(f"a worker process failed:\n{trace}")
    return error


def _end_with_parent() -> None:
    parent = torch.multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
