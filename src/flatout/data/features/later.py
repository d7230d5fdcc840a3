"""Writes rows from a device in a thread, while the device continues to compute."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from threading import BoundedSemaphore
from typing import Any

import torch

# Maximum number of batches of rows that may wait for the disk. Each is in pinned memory while it
# waits.
_WAITING = 4


class DeferredWriter:
    """Writes batches of rows in their order, each after its device has computed the rows."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._room = BoundedSemaphore(_WAITING)
        self._latest: Future[None] | None = None
        self._waiting: set[Hashable] = set()
        self._error: BaseException | None = None

    def write(
        self,
        names: Collection[Hashable],
        values: Sequence[torch.Tensor],
        write: Callable[[list[torch.Tensor]], None],
    ) -> None:
        """Write rows later. Changes of the values after this call do not change the rows."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, "flatout-features")
        self._room.acquire()
        copies = [_copied(value) for value in values]
        devices = {value.device for value in values if value.device.type != "cpu"}
        events = [torch.accelerator.current_stream(device).record_event() for device in devices]
        self._waiting.update(names)
        self._latest = self._pool.submit(self._run, [*names], copies, events, write)

    def _run(self, names: list[Hashable], copies: list[Any], events: list[Any], write: Any) -> None:
        try:
            for event in events:
                event.synchronize()
            write(copies)
        except BaseException as error:
            self._error = error
        finally:
            self._waiting.difference_update(names)
            self._room.release()

    def wait(self, names: Collection[Hashable] | None = None) -> None:
        """Wait until all rows are written, or until rows of these names are."""
        if self._latest is None or (names is not None and self._waiting.isdisjoint(names)):
            return
        self._latest.result()
        error, self._error = self._error, None
        if error is not None:
            raise error


def _copied(value: torch.Tensor) -> torch.Tensor:
    value = value.detach()
    if value.device.type == "cpu":
        return value.clone()
    pinned = torch.empty_like(value, device="cpu", pin_memory=True)
    return pinned.copy_(value, non_blocking=True)
