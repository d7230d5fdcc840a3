"""batch: several samples as one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from flatout.data.block import Numbers
from flatout.data.execution.batch_sampler import Last, Order, check_batch_size
from flatout.data.execution.samples import name_of
from flatout.data.order import order as drawn
from flatout.data.origins import Stream, is_rows
from flatout.data.stages.stage import P, Plan, Stage, Writable
from flatout.errors import DataError

_BY_LENGTH_WINDOW = 64


@dataclass(frozen=True)
class Batch(Stage):
    """Global batches of `size` samples."""

    size: int
    last: Last = "keep"
    window: int | None = None  # of batches within which rows of equal length come together

    once: ClassVar[bool] = True

    @property
    def reorders(self) -> bool:
        """Whether rows of about equal length come together."""
        return self.window is not None

    def check_stream(self, stream: Stream, stages: Sequence[Stage]) -> None:
        """Of a stream's last batch nothing is kept to fill it up with."""
        if self.last == "pad":
            raise DataError('batch(last="pad") is not for streams', do='use last="keep" or "drop"')

    def check_convert(self) -> None:
        """Refuse: rows are written, not batches."""
        raise DataError(
            "convert writes rows, and batch makes batches",
            do="convert the pipeline as it is before batch and shard",
        )

    def make(self, plan: Plan) -> None:
        """Functions behind it get whole batches."""
        plan.batched = True

    choose = stream = make

    def turn(self, stages: Sequence[Stage]) -> int:
        """Behind a shuffle, and behind a repeat of samples."""
        return 3

    def order(self, order: Order, plan: Plan) -> Order:
        """The order as it is, or by length."""
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
    """Global batches of `size` samples."""
    if last not in ("keep", "drop", "pad"):
        raise DataError(f"last: expected 'keep', 'drop' or 'pad', found {last!r}")
    window = _BY_LENGTH_WINDOW if by_length is True else int(by_length) or None
    return self._with(Batch(check_batch_size(size), last, window))


def by_length(
    inner: Order, lengths: Numbers, batch_size: int, window: int, seed: int | None
) -> Order:
    """Rows of about the same length side by side, so that their batches need little padding.

    Within each window of `window` batches rows are sorted by length, in descending order of the
    epoch where lengths are equal; then the window's batches are shuffled, unless `seed` is None.
    """

    def arranged(epoch: int) -> Numbers:
        numbers = inner(epoch).copy()
        size = window * batch_size
        for at, start in enumerate(range(0, len(numbers), size)):
            part = numbers[start : start + size]
            part[:] = part[np.argsort(lengths[part], kind="stable")]
            whole = len(part) // batch_size
            if seed is not None and whole > 1:
                # Its own number for each window's draw, beyond the epochs of `inner`.
                turn = drawn(whole, seed, (epoch << 32) + at + 1)
                batches = part[: whole * batch_size].reshape(whole, batch_size)
                batches[:] = batches[turn]
        return numbers

    return arranged
