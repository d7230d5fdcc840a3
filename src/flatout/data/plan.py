"""Which samples form which batch of an epoch, for the sources whose order is ours."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from flatout.data.order import order
from flatout.devices.threads import check_count
from flatout.errors import DataError

# What a user who names no batch size gets, as in Keras.
DEFAULT_BATCH_SIZE = 32


@dataclass(frozen=True)
class Plan:
    """An epoch cut into batches; make one with `plan_batches`, which checks the numbers.

    Attributes:
        samples: samples in the data.
        batch_size: samples per batch; the last batch may be smaller.
        shuffle: whether each epoch has a new order.
        seed: of the orders.
        drop_last: whether a smaller last batch is left out.
    """

    samples: int
    batch_size: int
    shuffle: bool
    seed: int
    drop_last: bool

    @property
    def steps(self) -> int:
        """Batches per epoch."""
        if self.drop_last:
            return self.samples // self.batch_size
        return -(-self.samples // self.batch_size)

    @property
    def used(self) -> int:
        """Samples per epoch, which `drop_last` may make fewer than there are."""
        return min(self.samples, self.steps * self.batch_size)

    def order(self, epoch: int) -> npt.NDArray[np.int64]:
        """The sample numbers of an epoch, int64 of shape (samples,)."""
        return order(self.samples, self.seed, epoch, self.shuffle)

    def first(self, start_step: int) -> int:
        """Where in the order batch `start_step` begins."""
        check_start(start_step, self.steps)
        return start_step * self.batch_size

    def describe(self) -> str:
        """In words, such as "shuffled by seed 0"."""
        return f"shuffled by seed {self.seed}" if self.shuffle else "in the given order"


def plan_batches(
    samples: int,
    *,
    batch_size: int | None,
    shuffle: bool,
    seed: int,
    drop_last: bool,
    clip_batch: bool = False,
) -> Plan:
    """A Plan for data of `samples` samples.

    Args:
        samples: samples in the data.
        batch_size: None means 32, or all samples where there are fewer.
        shuffle: whether each epoch has a new order.
        seed: of the orders.
        drop_last: whether a smaller last batch is left out.
        clip_batch: whether a batch larger than the data becomes the data, as evaluation wants it.

    Raises:
        DataError: there are no samples, or the batch size is no positive int or exceeds them.
    """
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
    return Plan(samples, batch_size, shuffle, seed, drop_last)


def last_batch(samples: int, batch_size: int, drop_last: bool) -> int:
    """Samples in the last of the batches that so many samples are cut into."""
    return batch_size if drop_last else samples % batch_size or batch_size


def check_batch_size(batch_size: int) -> int:
    """Refuse what is no positive int."""
    return _whole_number("batch_size", batch_size, 1)


def check_workers(workers: int) -> int:
    """Refuse what is no int from 0, and more processes than any job here can use."""
    check_count("input.workers", _whole_number("workers", workers, 0))
    return workers


def check_steps(steps: int) -> int:
    """Refuse what is no positive int."""
    return _whole_number("steps", steps, 1)


def _whole_number(name: str, value: int, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise DataError(f"{name}: expected an int of at least {least}, found {value!r}")
    return value


def check_start(start_step: int, steps: int | None) -> None:
    """Refuse a first step before an epoch's begin or past its end."""
    if start_step < 0 or (steps is not None and start_step > steps):
        raise DataError(
            f"an epoch has no step {start_step:,} to start from: it has "
            f"{'an unknown number of' if steps is None else format(steps, ',')} steps"
        )
