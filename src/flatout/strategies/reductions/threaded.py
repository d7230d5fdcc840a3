"""Reductions in parallel with the step: a thread runs them in order while backward continues.

A reduction may thus be written as sequential code, and all ranks run theirs in the order in which
they were begun.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from queue import SimpleQueue
from threading import Event, Thread
from typing import Any

import torch

from flatout.strategies.reductions.collectives import AllReduce
from flatout.strategies.reductions.reduction import Flat, Reduction


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


class ThreadedReduction:
    """Runs a reduction in a thread; the library's own all-reduce needs none."""

    def __init__(self, reduction: Reduction, device: torch.device) -> None:
        self.reduction, self.device = reduction, device
        self._queue: SimpleQueue[Pending | None] = SimpleQueue()
        if isinstance(reduction, AllReduce):
            return
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

    @property
    def carries(self) -> bool:
        """True if a part of the gradients is kept for later steps."""
        return self.reduction.carries

    @property
    def is_exact(self) -> bool:
        """True if other numbers may travel with the gradients."""
        return self.reduction.is_exact

    def memory(
        self, number: int, length: int, dtype: torch.dtype, device: torch.device | None = None
    ) -> torch.Tensor:
        """Return zeros for a bucket's gradients, on their device or, for None, the usual device."""
        return self.reduction.memory(number, length, dtype, device or self.device)

    def state_dict(self) -> dict[str, Any]:
        """Return the state that this rank keeps for later steps. Call this between steps."""
        return self.reduction.state_dict()

    def load_state_dicts(self, states: Sequence[dict[str, Any]]) -> None:
        """Load the states of all ranks, by rank."""
        self.reduction.load_state_dicts(states)

    def weigh(self, waiting: Any, weight: torch.Tensor) -> None:
        """Set the weight of the step once it is known."""

        def take() -> None:
            waiting.wait()
            self.reduction.weight = float(weight)

        self._begin(take)

    def begin(self, flat: Flat) -> Any:
        """Begin a sum in the background, and return an object to `wait()` for."""
        if isinstance(self.reduction, AllReduce):
            return self.reduction.begin(flat)
        return self._begin(lambda: self.reduction.add_up(flat))

    def _begin(self, run: Callable[[], None]) -> Pending:
        pending = Pending(run, self.device)
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
