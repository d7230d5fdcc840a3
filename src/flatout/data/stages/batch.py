"""batch: split samples into batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from flatout.data.execution.batch_sampler import Last, Order, check_batch_size
from flatout.data.execution.samples import name_of
from flatout.data.randomness import order as drawn
from flatout.data.reading.block import Numbers
from flatout.data.reading.origins import Stream, is_rows
from flatout.data.stages.stage import P, Plan, Stage, Writable
from flatout.errors import DataError

# Batches of a window for by_length=True.
_BY_LENGTH_WINDOW = 64


@dataclass(frozen=True)
class Batch(Stage):
    """Global batches of `size` samples.

    Attributes:
        size: number of samples of a global batch.
        last: "keep", "drop" or "pad" a smaller last batch.
        window: number of batches within which rows are sorted by length; None does not sort.
    """

    size: int
    last: Last = "keep"
    window: int | None = None

    once: ClassVar[bool] = True

    @property
    def reorders(self) -> bool:
        """Whether rows of about equal length come together."""
        return self.window is not None

    def check_stream(self, stream: Stream, stages: Sequence[Stage]) -> None:
        """Refuse `last` "pad": no earlier rows of a stream are kept to fill its last batch up."""
        if self.last == "pad":
            raise DataError('batch(last="pad") is not for streams', do='use last="keep" or "drop"')

    def check_convert(self) -> None:
        """Refuse to convert, since rows are written, not batches."""
        raise DataError(
            "convert writes rows, and batch makes batches",
            do="convert the pipeline as it is before batch and shard",
        )

    def make(self, plan: Plan) -> None:
        """Mark the start of whole batches: functions after this stage get whole batches."""
        plan.batched = True

    choose = stream = make

    def turn(self, stages: Sequence[Stage]) -> int:
        """Return a sort key, so that `order` is called after a shuffle and a repeat of samples."""
        return 3

    def order(self, order: Order, plan: Plan) -> Order:
        """Return the order unchanged, or sorted by length."""
        plan.runs += [self.name, *(blend.kind for blend in plan.blends)]
        plan.runs += [f"map {name_of(function)}" for function in plan.functions]
        if self.window is None:
            return order
        lengths = plan.origin.lengths() if is_rows(plan.origin) else None
        if lengths is None:
            raise DataError(
                "batch(by_length=...) wants ragged rows whose lengths are known in advance, as of "
                "LibSVM and TFRecord files with a ragged column"
            )
        return by_length(order, lengths, self.size, self.window, plan.order_seed)


def batch(self: Writable[P], size: int, *, last: Last = "keep", by_length: bool | int = False) -> P:
    """Cut samples into global batches of `size` samples."""
    if last not in ("keep", "drop", "pad"):
        raise DataError(f"last: expected 'keep', 'drop' or 'pad', found {last!r}")
    window = _BY_LENGTH_WINDOW if by_length is True else int(by_length) or None
    return self._with(Batch(check_batch_size(size), last, window))


def by_length(
    inner: Order, lengths: Numbers, batch_size: int, window: int, seed: int | None
) -> Order:
    """Return an order whose batches have rows of similar length and so need little padding.

    Within each window of `window` batches, rows are sorted by length; rows of equal length stay in
    the order of the epoch. Then the window's batches are shuffled, unless `seed` is None.
    """

    def arranged(epoch: int) -> Numbers:
        numbers = inner(epoch).copy()
        size = window * batch_size
        for at, start in enumerate(range(0, len(numbers), size)):
            part = numbers[start : start + size]
            part[:] = part[np.argsort(lengths[part], kind="stable")]
            whole = len(part) // batch_size
            if seed is not None and whole > 1:
                # Each window's draw has its own number, above all epochs of `inner`.
                turn = drawn(whole, seed, (epoch << 32) + at + 1)
                batches = part[: whole * batch_size].reshape(whole, batch_size)
                batches[:] = batches[turn]
        return numbers

    return arranged
