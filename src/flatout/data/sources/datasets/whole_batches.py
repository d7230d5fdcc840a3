"""Datasets that return a whole batch for an array of indices.

Many Datasets do so by chance: `return self.x[index], self.y[index]` accepts an index or an array of
indices. Such batches are only used for samples that were made in both ways once, with equal bits.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any

import numpy as np
import torch

from flatout.data.batches.batch import named_tensors
from flatout.data.batches.tensors import as_batch
from flatout.data.digests.unchanged import Attributes
from flatout.errors import DataError

# Minimum speedup, of a batch made at once over a batch made sample by sample, for which all samples
# are compared.
_WORTH = 4.0
# Seconds of a batch below which no faster way is needed.
_LEAST_S = 3e-4
# Epochs that found the Dataset changed, after which samples are not compared any more.
_CHANGES = 2


class WholeBatches:
    """Samples of a Dataset that are equal when a whole batch is made at once.

    Attributes:
        why_not: reason why whole batches are not used; empty while they may be.
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
        """Whether every sample was compared and equal."""
        return bool(self._same.all())

    @property
    def words(self) -> str:
        ratio = self._one_by_one_s / self._at_once_s
        return (
            f"whole batches, made {ratio:.1f}x faster than sample by sample; all "
            f"{len(self._same):,} samples were compared bit for bit"
        )

    def begin_epoch(self) -> None:
        """Forget all comparisons if the Dataset has changed since."""
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
        """Return the batch of these samples made at once, or None before all are compared."""
        index = np.array(numbers, np.int64)
        if self.why_not or not self._same[index].all():
            return None
        try:
            return self._dataset[index]
        except Exception as error:
            self.give_up(f"asked for many samples at once it raises {type(error).__name__}")
            return None

    def compare(self, numbers: list[int], made: Any, made_s: float) -> None:
        """Make a batch at once, and record whether it equals the batch made sample by sample."""
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
    """Return whether two values are the same batch: structure, dtypes and every bit."""
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
    # Compared as bytes, so that a NaN equals itself and zeros differ by their sign.
    return torch.equal(
        *(t.contiguous().view(-1).view(torch.uint8) for t in (one.cpu(), other.cpu()))
    )
