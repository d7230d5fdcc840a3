"""Batches whose samples a store has as features. These samples are neither read nor made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from flatout.data.batches.batch import Batch, Features, KeptFeatures, map_tensors, named_tensors
from flatout.data.batches.form import Form
from flatout.data.execution.row_names import NamedSlots, ReplacedFiles, WatchedFiles
from flatout.data.execution.turns import Turns, turns_at
from flatout.data.features.store import FeatureStore
from flatout.data.reading.block import Numbers
from flatout.data.reading.files import File


@dataclass(frozen=True)
class Numbered:
    """Samples by index, each of which has one result, or a few results (variants), in all epochs.

    Attributes:
        rows: number of samples; their indices are 0 to rows - 1.
        content: returns 16 hex digits that differ for any different sample, or None if not
            possible. It may read all of the data.
        variants: number of variants of a sample.
        variant: returns the index of each sample's variant in an epoch, int64; None if samples have
            one variant.
        named: returns a name for each slot (pair of sample and variant) that does not depend on
            other samples; None without such names.
        comes_whole: whether batches always contain all samples, with targets. `content` and stored
            rows then cover only the inputs.
        files: files with many rows each, from which each epoch reads samples.
    """

    rows: int
    content: Callable[[], str | None]
    variants: int = 1
    variant: Callable[[Numbers, Turns], Numbers] | None = None
    named: Callable[[], NamedSlots | None] = lambda: None
    comes_whole: bool = False
    files: Sequence[File] = ()

    @property
    def slots(self) -> int:
        """Number of pairs of a sample and a variant."""
        return self.rows * self.variants

    def slots_of(self, numbers: Numbers, epoch: Turns) -> Numbers:
        """Return the slots of these samples in an epoch: index * variants + variant."""
        if self.variant is None:
            return numbers
        return numbers * self.variants + self.variant(numbers, epoch)


@dataclass(frozen=True)
class FeatureRows:
    """A store's rows for the batches of some samples.

    Attributes:
        samples: samples whose features the store keeps.
        store: store of the features.
        parts: number of tensors of a stored row that are features; they come first. The next
            tensors are the targets and the weight, in the order of `named_tensors`, unless batches
            come whole or the targets are known.
        files: checks of the files that samples are read from; None without such files.
        targets: targets of all samples, if they are known without reading any.
    """

    samples: Numbered
    store: FeatureStore
    parts: int
    files: ReplacedFiles | WatchedFiles | None = None
    targets: npt.NDArray[Any] | None = None

    @property
    def are_alone(self) -> bool:
        """Whether rows hold features alone, without targets and weights."""
        return self.samples.comes_whole or self.targets is not None

    def has(self, numbers: Numbers, epoch: Turns) -> npt.NDArray[np.bool_]:
        """Return which of these samples have a row in an epoch.

        Raises:
            DataError: a file that holds many of the samples was replaced.
        """
        if self.files is not None:
            self.files.look(numbers)
        return self.store.has(self.samples.slots_of(numbers, epoch))

    def batch(
        self,
        numbers: Numbers,
        there: npt.NDArray[np.bool_],
        epoch: Turns,
        made: Batch | None,
        form: Form,
    ) -> Batch:
        """Return the batch of some samples, in this order.

        Args:
            numbers: indices of the samples.
            there: whether each sample's features are in the store, bool; at least one is.
            epoch: the epoch, or the turns of the samples (turns.py), which decide their variants.
            made: the samples that the store does not have, without samples that cannot be read;
                None without such samples.
            form: structure of the samples.
        """
        missing = numbers[~there]
        if len(missing) > (0 if made is None else made.size):
            good = there.copy()
            good[~there] = False if made is None else np.isin(missing, np.asarray(made.indices))
            numbers, there, epoch = numbers[good], there[good], turns_at(epoch, good)
        slots = self.samples.slots_of(numbers[there], turns_at(epoch, there))
        values = self.store.get(slots)
        if self.targets is None:
            beside = [None] * len(values) if made is None else _beside(made, form)
            rest = zip(values[self.parts :], beside, strict=False)
            joined = (joined_rows(kept, other, there) for kept, other in rest)
            targets, weight = map_tensors(lambda _: next(joined), (form.targets, form.weight))
        else:
            targets, weight = torch.from_numpy(self.targets[numbers]), None
        places = torch.from_numpy(np.flatnonzero(there))
        return Batch(
            inputs=() if made is None else made.inputs,
            targets=targets,
            weight=weight,
            indices=torch.from_numpy(numbers),
            size=len(numbers),
            kept=KeptFeatures(Features(values[: self.parts]), places),
            turns=None if isinstance(epoch, int) else torch.from_numpy(epoch),
        )


def _beside(made: Batch, form: Form) -> list[Any]:
    parts = (made.targets, made.weight if form.weight is not None else None)
    return [tensor for _, tensor in named_tensors("", parts)]


def joined_rows(kept: Tensor, made: Tensor | None, there: npt.NDArray[np.bool_]) -> Tensor:
    """Join stored rows and newly made rows in the batch's order.

    Args:
        kept: a row for each position where `there` is True.
        made: a row for each position where `there` is False, on the same device; None without rows.
        there: bool of shape (rows,).
    """
    if made is None:
        return kept
    joined = kept.new_empty((len(there), *kept.shape[1:]))
    # Indices instead of a mask: counting the rows of a mask would wait for the device.
    for which, rows in ((there, kept), (~there, made)):
        at = torch.from_numpy(np.flatnonzero(which)).to(kept.device, non_blocking=True)
        joined.index_copy_(0, at, rows)
    return joined
