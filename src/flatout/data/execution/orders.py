"""The orders of epochs: that of the next one is made while the present one runs."""

from __future__ import annotations

import threading
from contextlib import suppress

from flatout.data.block import Numbers
from flatout.data.execution.batch_sampler import BatchSampler
from flatout.measure import available_bytes, usable_cpus

# Fewer rows are brought into order in less than half a millisecond.
_MANY = 1 << 15
# Of the free memory, what an order that is not needed yet may take, with what sorting it takes.
_ROOM = 1 / 8
_ROW_BYTES = 24


class Orders:
    """The order of each epoch, made ahead by a thread if it is long."""

    def __init__(self, cut: BatchSampler, many: int = _MANY) -> None:
        self._cut, self._many = cut, many
        self._thread: threading.Thread | None = None
        self._made: tuple[int, Numbers] | None = None

    def of(self, epoch: int) -> Numbers:
        """The rows of an epoch, in their order."""
        if self._thread is not None:
            self._thread.join()
        made, self._thread, self._made = self._made, None, None
        return made[1] if made is not None and made[0] == epoch else self._cut.order(epoch)

    def prepare(self, epoch: int) -> None:
        """Begin to make the order of an epoch that is likely to come next."""
        rows = self._cut.samples
        if not self._cut.shuffle or rows < self._many or usable_cpus() < 2:
            return
        if self._thread is not None:
            return
        if rows * _ROW_BYTES > _ROOM * available_bytes():
            return

        def make() -> None:
            # An error comes again, and to the right one, when the order is wanted.
            with suppress(Exception):
                self._made = epoch, self._cut.order(epoch)

        self._thread = threading.Thread(target=make, name="flatout-order", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:  # the system starts no more: the order is made when it is wanted
            self._thread = None
