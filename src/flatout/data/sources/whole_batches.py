"""Datasets that give a whole batch when they are asked for an array of numbers.

Many do without knowing: `return self.x[index], self.y[index]` takes an array as well as a number.
That is used for a sample only after it was made both ways once, and every bit was the same.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any

import numpy as np
import torch

from flatout.data.batch import named_tensors
from flatout.data.execution.unchanged import Attributes
from flatout.data.tensors import as_batch
from flatout.errors import DataError

# Making a batch at once must be so many times faster to be worth a comparison of all samples.
_WORTH = 4.0
# Batches that take less are quick enough.
_LEAST_S = 3e-4
# A Dataset that is another one in so many epochs is never known long enough.
_CHANGES = 2


class WholeBatches:
    """Which samples of a Dataset come out the same when they are asked for together.

    Attributes:
        why_not: why whole batches are not used; empty while they may be.
    """

    def __init__(self, dataset: Any, clock: Callable[[], float] = perf_counter) -> None:
        self.why_not = ""
        self._dataset = dataset
        self.clock = clock
        self._same = np.zeros(len(dataset), bool)
        self._attributes: Attributes | None = None
        self._changes = 0
        self._one_by_one_s, self._at_once_s = 0.0, 1e-9

    @property
    def are_all_known(self) -> bool:
        """Whether every sample was the same both ways."""
        return bool(self._same.all())

    @property
    def words(self) -> str:
        ratio = self._one_by_one_s / self._at_once_s
        return (
            f"whole batches, made {ratio:.1f}x faster than sample by sample; all "
            f"{len(self._same):,} samples were compared bit for bit"
        )

    def begin_epoch(self) -> None:
        """Forget what was compared where the Dataset was changed since."""
        if self._attributes is None or self.why_not:
            return
        changed = self._attributes.changed(self._dataset)
        if changed:
            self._same[:] = False
            self._attributes = Attributes(self._dataset)
            self._changes += 1
            if self._changes >= _CHANGES:
                self.give_up(f"{changed} is another one in each epoch")

    def take(self, numbers: list[int]) -> Any:
        """The batch of these samples, made at once; None where one of them was not compared yet."""
        index = np.array(numbers, np.int64)
        if self.why_not or not self._same[index].all():
            return None
        try:
            return self._dataset[index]
        except Exception as error:
            self.give_up(f"asked for many samples at once it raises {type(error).__name__}")
            return None

    def compare(self, numbers: list[int], made: Any, made_s: float) -> None:
        """Make a batch at once that was made sample by sample, and note whether it is the same."""
        if made_s < _LEAST_S:
            self.give_up("batches are made quickly")
            return
        if self._attributes is None:
            self._attributes = Attributes(self._dataset)
        index = np.array(numbers, np.int64)
        start = self.clock()
        try:
            value = self._dataset[index]
        except Exception as error:
            self.give_up(f"asked for many samples at once it raises {type(error).__name__}")
            return
        self._one_by_one_s += made_s
        self._at_once_s += self.clock() - start
        if self._at_once_s * _WORTH > self._one_by_one_s:
            self.give_up("many samples at once take as long as one by one")
        elif same_batch(value, made):
            self._same[index] = True
        else:
            self.give_up("many samples at once are others than one by one")

    def give_up(self, why: str) -> None:
        self.why_not = why
        self._attributes = None


def same_batch(a: Any, b: Any) -> bool:
    """Whether two values are the same batch: structure, dtypes and every bit."""
    try:
        parts = [list(named_tensors("", as_batch(batch, "a batch")[:3])) for batch in (a, b)]
    except DataError:
        return False
    first, second = parts
    return len(first) == len(second) and all(map(_is_same, first, second))


def _is_same(a: tuple[str, torch.Tensor], b: tuple[str, torch.Tensor]) -> bool:
    (name, one), (other_name, other) = a, b
    if (name, one.dtype, one.shape) != (other_name, other.dtype, other.shape):
        return False
    # As bytes, so that a NaN is the same as itself and zeros differ by their sign.
    return torch.equal(
        *(t.contiguous().view(-1).view(torch.uint8) for t in (one.cpu(), other.cpu()))
    )
