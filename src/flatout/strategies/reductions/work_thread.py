"""A thread that reduces gradients in parallel with the step."""

from __future__ import annotations

from collections.abc import Callable
from queue import SimpleQueue
from threading import Event, Thread
from typing import Any

import torch


class Pending:
    """A piece of work that was begun."""

    def __init__(self, run: Callable[[], None], device: torch.device) -> None:
        self._run = run
        self._ended = Event()
        self._error: BaseException | None = None
        self._device, self._on_gpu = device, device.type == "cuda"
        # On a GPU the work waits for earlier computations, and a waiter's later computations for
        # the work.
        self._begun = torch.cuda.current_stream(device).record_event() if self._on_gpu else None
        self._done: Any = None

    def run(self, stream: Any) -> bool:
        try:
            if stream is None:
                self._run()
            else:
                with torch.cuda.device(stream.device), torch.cuda.stream(stream):
                    stream.wait_event(self._begun)
                    self._run()
                    self._done = stream.record_event()
        except BaseException as error:
            self.fail(error)
            return False
        self._ended.set()
        return True

    def fail(self, error: BaseException) -> None:
        self._error = error
        self._ended.set()

    def wait(self) -> None:
        self._ended.wait()
        if self._error is not None:
            raise self._error
        if self._done is not None:
            torch.cuda.current_stream(self._device).wait_event(self._done)


class WorkThread:
    """A thread that does work on a device's tensors in the order in which it was begun."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._queue: SimpleQueue[Pending | None] = SimpleQueue()
        ready = Event()
        # A daemon thread, because a failed rank must be able to end while threads wait for other
        # ranks.
        thread = Thread(
            target=_work, args=(self._queue, device, ready), name="flatout-reduction", daemon=True
        )
        threads = torch.get_num_threads()
        thread.start()
        ready.wait()
        # The thread has set its own number of threads, and with it that of later threads.
        torch.set_num_threads(threads)

    def begin(self, run: Callable[[], None]) -> Pending:
        """Let the thread call a function, and return an object to `wait()` for."""
        pending = Pending(run, self._device)
        self._queue.put(pending)
        return pending

    def close(self) -> None:
        """End the thread after the work that was begun."""
        self._queue.put(None)


def _work(queue: SimpleQueue[Pending | None], device: torch.device, ready: Event) -> None:
    # Backward needs the cores. Matrix products then also have the same bits on all ranks.
    torch.set_num_threads(1)
    on_gpu = device.type == "cuda"
    stream = torch.cuda.Stream(device) if on_gpu else None  # type: ignore[no-untyped-call]
    ready.set()
    failed: Pending | None = None
    with torch.no_grad():
        while (pending := queue.get()) is not None:
            if failed is not None:
                # The ranks are no longer in step.
                pending.fail(failed._error or RuntimeError("an earlier reduction failed"))
            elif not pending.run(stream):
                failed = pending
