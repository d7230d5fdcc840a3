"""Assignment of rows to batches: the order, the batches, and the part of each batch for a rank."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Literal, TypeAlias

import numpy as np

from flatout.data.randomness import order
from flatout.data.reading.block import Numbers
from flatout.devices import check_count
from flatout.errors import DataError
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


Last = Literal["keep", "drop", "pad"]
# Batch size if the user names none, as in Keras.
DEFAULT_BATCH_SIZE = 32
# Returns the row indices of an epoch, in their order, for the index of the epoch.
Order: TypeAlias = Callable[[int], Numbers]


@dataclass(frozen=True)
class BatchSampler:
    """An epoch split into batches. Results depend only on the attributes and the epoch's index.

    Attributes:
        samples: number of rows in an epoch, of all ranks.
        batch_size: number of rows of a global batch.
        order: returns the row indices of an epoch, for the epoch's index.
        last: "keep" or "drop" a smaller last batch, or "pad" it with copies of its first rows,
            whose weight is 0.
        rank: rank that reads its part of each batch.
        world_size: number of ranks that divide each batch.
        even_steps: number of steps over which this rank's own rows are spread, if `samples` counts
            only this rank's rows. Ranks with different numbers of rows then make the same number of
            steps.
        shuffle: whether the order differs from 0, 1, 2, ...
        seed: seed of the order.
        passes: number of equal parts of an epoch that each end with a separate last batch.
    """

    samples: int
    batch_size: int
    order: Order
    last: Last = "keep"
    rank: int = 0
    world_size: int = 1
    even_steps: int | None = None
    shuffle: bool = True
    seed: int = 0
    passes: int = 1

    @property
    def steps(self) -> int:
        """Number of batches in an epoch, the same on every rank."""
        return self.passes * self._pass_steps

    @property
    def used(self) -> int:
        """Number of rows in an epoch that batches use, of all ranks."""
        return self.passes * self._pass_used

    @property
    def _pass_rows(self) -> int:
        return self.samples // self.passes

    @property
    def _pass_steps(self) -> int:
        if self.even_steps is not None:
            return self.even_steps // self.passes
        if self.last == "drop":
            return self._pass_rows // self.batch_size
        return -(-self._pass_rows // self.batch_size)

    @property
    def _pass_used(self) -> int:
        if self.even_steps is not None:
            return self._pass_rows
        return min(self._pass_rows, self._pass_steps * self.batch_size)

    def bounds(self, step: int) -> tuple[int, int]:
        """Return the start and end, in the order, of this rank's part of batch `step`.

        A batch of fewer rows than ranks goes whole to every rank, so that no rank is without rows.
        Where such a batch is filled up, some ranks have only rows that fill it up.
        """
        turn, step = divmod(step, self._pass_steps)
        begin, rows = turn * self._pass_rows, self._pass_rows
        if self.even_steps is not None:
            return (
                begin + rows * step // self._pass_steps,
                begin + rows * (step + 1) // self._pass_steps,
            )
        size = min(self.batch_size, self._pass_used - step * self.batch_size)
        start = begin + step * self.batch_size
        if size < self.world_size and self.last != "pad":
            return start, start + size
        return (
            start + size * self.rank // self.world_size,
            start + size * (self.rank + 1) // self.world_size,
        )

    def places(self) -> Numbers:
        """Return the positions, in the order, of all rows that this rank uses in an epoch."""
        parts = [np.arange(*self.bounds(step)) for step in range(self.steps)]
        return np.concatenate(parts) if parts else np.empty(0, np.int64)

    def before(self, step: int) -> int:
        """Return the position, in the order, of the row before this rank's part of batch `step`.

        The row before the first row of a global batch is the batch's last row. Where ranks have
        their own rows, it is the last row of this rank's part.
        """
        start, stop = self.bounds(step)
        if self.even_steps is not None:
            return max(start, stop - 1)
        turn, at = divmod(step, self._pass_steps)
        first = turn * self._pass_rows + at * self.batch_size
        size = min(self.batch_size, self._pass_used - at * self.batch_size)
        return start - 1 if start > first else first + size - 1

    def padding(self, step: int) -> int:
        """Return the number of rows that fill up this rank's part of a batch, for `last` "pad"."""
        if self.last != "pad" or self.even_steps is not None:
            return 0  # the maker of the batch fills up an empty part
        start, stop = self.bounds(step)
        full = self.batch_size * (self.rank + 1) // self.world_size
        full -= self.batch_size * self.rank // self.world_size
        return max(0, full - (stop - start))

    def describe(self) -> str:
        return f"shuffled by seed {self.seed}" if self.shuffle else "in the given order"

    def first(self, step: int) -> int:
        """Return the start, in the order, of batch `step`; refuse a step that does not exist."""
        check_start(step, self.steps)
        if step == self.steps:
            return self.samples
        turn, step = divmod(step, self._pass_steps)
        return turn * self._pass_rows + step * self.batch_size

    def starts(self) -> Numbers:
        """Return the starts, in the order, of all global batches, including dropped batches."""
        turns = np.arange(self.passes) * self._pass_rows
        return (turns[:, None] + np.arange(0, self._pass_rows, self.batch_size)).ravel()


def batches_of(
    samples: int,
    *,
    batch_size: int | None,
    shuffle: bool,
    seed: int,
    drop_last: bool,
    clip_batch: bool = False,
) -> BatchSampler:
    if samples < 1:
        raise DataError("the data is empty: expected at least 1 sample, found 0")
    if batch_size is None:
        batch_size = min(DEFAULT_BATCH_SIZE, samples)
    if check_batch_size(batch_size) > samples:
        if not clip_batch:
            raise DataError(
                f"the batch is larger than the data: batch_size is {batch_size:,}, "
                f"but there are {samples:,} samples",
                do=f"lower batch_size to at most {samples:,}",
            )
        batch_size = samples
    own = partial(order, samples, seed, shuffle=shuffle)
    last: Last = "drop" if drop_last else "keep"
    return BatchSampler(samples, batch_size, own, last, shuffle=shuffle, seed=seed)


def last_batch(samples: int, batch_size: int, drop_last: bool) -> int:
    """Return the number of samples in the last batch of `samples` samples."""
    return batch_size if drop_last else samples % batch_size or batch_size


def check_batch_size(batch_size: int) -> int:
    return whole_number("batch_size", batch_size, 1)


def check_workers(workers: int) -> int:
    check_count("input.workers", whole_number("workers", workers, 0))
    return workers


def check_steps(steps: int) -> int:
    return whole_number("steps", steps, 1)


def whole_number(name: str, value: int, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise DataError(f"{name}: expected an int of at least {least}, found {value!r}")
    return value


def check_start(start_step: int, steps: int | None) -> None:
    if start_step < 0 or (steps is not None and start_step > steps):
        raise DataError(
            f"an epoch has no step {start_step:,} to start from: it has "
            f"{'an unknown number of' if steps is None else format(steps, ',')} steps"
        )


def padding_share(numbers: Numbers, lengths: Numbers, starts: Numbers) -> float:
    """Return the fraction of padding among the batches' values; 0 if no row is padded."""
    result = lengths[numbers]
    widest = np.maximum.reduceat(result, starts)
    sizes = np.diff(np.append(starts, len(result)))
    padded = int((widest * sizes).sum())
    return 1 - float(result.sum()) / padded if padded else 0.0
