"""Orders of epochs: the next order is made while the present epoch runs."""

from __future__ import annotations

import threading
from contextlib import suppress

from flatout.data.execution.batch_sampler import BatchSampler
from flatout.data.reading.block import Numbers
from flatout.measure import available_bytes, usable_cpus

# Minimum number of rows for which the next order is made ahead; fewer rows take under 0.5 ms.
_MANY = 1 << 15
# _ROOM: fraction of the free memory that an order made ahead may use. _ROW_BYTES: bytes of memory
# per row of the order.
_ROOM = 1 / 8
_ROW_BYTES = 24


class Orders:
    """The order of each epoch, made ahead by a thread if it is long."""

    def __init__(self, cut: BatchSampler, many: int = _MANY) -> None:
        self._cut, self._many = cut, many
        self._thread: threading.Thread | None = None
        self._made: tuple[int, Numbers] | None = None

    def of(self, epoch: int) -> Numbers:
        """Return the rows of an epoch, in their order."""
        if self._thread is not None:
            self._thread.join()
        made, self._thread, self._made = self._made, None, None
        return made[1] if made is not None and made[0] == epoch else self._cut.order(epoch)

    def prepare(self, epoch: int) -> None:
        """Start to make the order of an epoch that probably comes next."""
        rows = self._cut.samples
        if not self._cut.shuffle or rows < self._many or usable_cpus() < 2:
            return
        if self._thread is not None:
            return
        if rows * _ROW_BYTES > _ROOM * available_bytes():
            return

        def make() -> None:
            # The thread that needs the order makes it again, and then raises the error.
            with suppress(Exception):
                self._made = epoch, self._cut.order(epoch)

        self._thread = threading.Thread(target=make, name="flatout-order", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:  # no thread can be started: the order is made when it is needed
            self._thread = None
