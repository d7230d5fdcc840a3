"""One process that makes batches, and the transfer of values between two processes by a pipe.

It is spawned, never forked: a fork after a parallel operation hangs in OpenMP. It gets tasks
through its own pipe, of which the parent keeps only one end. So the pipe ends when the process ends
at any moment, and the parent never waits for a dead process.

torch would share each tensor by a file in /dev/shm, and send its descriptor through a socket in a
temporary folder; a killed process may leave these files there. Here, one file without a name
holds all tensors of a value, and its descriptor goes through the pipe.
"""

from __future__ import annotations

import io
import mmap
import os
import pickle
import signal
import socket
import threading
import traceback
from multiprocessing import reduction
from multiprocessing.util import Finalize
from typing import Any

import torch
from torch import Tensor

from flatout.data.batches.batch import Batch
from flatout.data.reading.changed import found_here, take_over
from flatout.data.workers.waiting import Waiting
from flatout.errors import DataError

# Bytes of a message that hold the size of its tensors.
_SIZE_BYTES = 8
# Alignment of each tensor in shared memory, in bytes.
_ALIGNED = 64


def send(pipe: Any, value: Any) -> None:
    """Send a value through a duplex pipe, whose other end only `receive` may read.

    Raises:
        OSError: the other end is closed, or there is not enough memory.
    """
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.dump(value)
    if not pickler.size:
        pipe.send_bytes(bytes(_SIZE_BYTES) + file.getbuffer())
        return
    shared = os.memfd_create("flatout-batch", os.MFD_CLOEXEC)
    try:
        os.posix_fallocate(shared, 0, pickler.size)
        mapped = mmap.mmap(shared, pickler.size)
        for tensor, place in pickler.tensors:
            _at(place, mapped).copy_(tensor)
        pipe.send_bytes(pickler.size.to_bytes(_SIZE_BYTES, "little") + file.getbuffer())
        with socket.fromfd(pipe.fileno(), socket.AF_UNIX, socket.SOCK_STREAM) as way:
            reduction.sendfds(way, [shared])
    finally:
        os.close(shared)


def receive(pipe: Any) -> Any:
    """Wait for the next value that `send` has sent, and return it."""
    data = memoryview(pipe.recv_bytes())
    size = int.from_bytes(data[:_SIZE_BYTES], "little")
    mapped = _received(pipe, size) if size else None
    return _Unpickler(io.BytesIO(data[_SIZE_BYTES:]), mapped).load()


def _received(pipe: Any, size: int) -> mmap.mmap:
    with socket.fromfd(pipe.fileno(), socket.AF_UNIX, socket.SOCK_STREAM) as way:
        try:
            (shared,) = reduction.recvfds(way, 1)
        # the other process ended after sending the value, before sending the descriptor
        except RuntimeError as error:
            raise EOFError from error
    try:
        return mmap.mmap(shared, size)
    finally:
        os.close(shared)


# Position of a tensor: its dtype, its shape, its strides, and its first byte.
_Place = tuple[torch.dtype, tuple[int, ...], tuple[int, ...], int]


def _at(place: _Place, mapped: mmap.mmap) -> Tensor:
    dtype, shape, strides, start = place
    count = (len(mapped) - start) // dtype.itemsize
    flat = torch.frombuffer(mapped, dtype=dtype, offset=start, count=count)
    return flat.as_strided(shape, strides)


class _Pickler(pickle.Pickler):
    """Pickles a value without its tensors, and assigns a position in the file to each tensor."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.tensors: list[tuple[Tensor, _Place]] = []
        self.size = 0

    def persistent_id(self, value: Any) -> _Place | None:
        if not _is_plain(value):
            return None
        # Strides as in memory, such as channels last, but without gaps and repeated elements.
        strides = torch.empty_like(value, device="meta").stride()
        place = value.dtype, tuple(value.shape), strides, self.size
        self.tensors.append((value, place))
        self.size += -(-value.numel() * value.element_size() // _ALIGNED) * _ALIGNED
        return place


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, mapped: mmap.mmap | None) -> None:
        super().__init__(file)
        self._mapped = mapped

    def persistent_load(self, place: _Place) -> Tensor:
        assert self._mapped is not None
        return _at(place, self._mapped)


def _is_plain(value: Any) -> bool:
    return (
        type(value) is Tensor
        and value.layout == torch.strided
        and value.device.type == "cpu"
        and not (value.requires_grad or value.is_quantized or value.numel() == 0)
        and hasattr(os, "memfd_create")
    )


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
