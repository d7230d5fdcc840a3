"""Refuses batches of one sample before the first step if BatchNorm cannot train on them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from flatout.data import Batch, Source, last_batch_of
from flatout.errors import DataError
from flatout.models import is_batch_coupled
from flatout.train.losses.loss_value import Compute
from flatout.train.snapshot import untouched

# Part of torch's error message if BatchNorm gets a single value per channel, which has no variance.
_ONE_VALUE = "Expected more than 1 value per channel"


def check_last_batch(
    model: nn.Module, compute: Compute, first: Sequence[Batch], source: Source
) -> None:
    """Refuse a last batch of one sample if BatchNorm cannot compute statistics from it.

    All ranks get the same result, since such a batch goes whole to every rank.
    """
    size = source.batch_size
    # Each rank has only a part of the batch, but synchronized statistics are those of the whole
    # batch.
    ones = [number for number, batch in enumerate(first, 1) if (batch.whole or batch.size) == 1]
    is_known = size not in (None, 1) and last_batch_of(source) == 1
    if first[0].is_jagged:
        return  # a batch of one graph has many nodes
    if not (is_known or ones) or not is_batch_coupled(model):
        return
    try:
        with untouched(model, compute), torch.no_grad():
            compute(first[0].rows(0, 1))
    except Exception as error:
        # No error: images have many values per channel. Other errors will occur with the whole
        # batch, too.
        if not is_one_value(error):
            return
        if size is None or not is_known:
            raise _one_sample(f"batch {ones[0]} of the first epoch") from error
        raise DataError(
            f"the last batch of an epoch has one sample, which BatchNorm cannot take statistics "
            f"from: {source.samples:,} samples in batches of {size:,}",
            where=source.describe(),
            do=f'leave it out with fit(..., drop_last=True), .batch({size}, last="drop") or a '
            'DataLoader\'s drop_last=True, fill it up with .batch(..., last="pad"), or choose '
            "another batch size",
        ) from error


def explain_one_sample(error: Exception, batches: Sequence[Batch], step: int) -> None:
    """Explain BatchNorm's error for a batch of one sample that could not be foreseen.

    Such batches come from sources of unknown length, such as pipes and generators.
    """
    if is_one_value(error) and not all(batch.size > 1 for batch in batches):
        raise _one_sample(f"step {step:,}") from error


def _one_sample(where: str) -> DataError:
    return DataError(
        "a batch has one sample, which BatchNorm cannot take statistics from",
        where=where,
        do='leave it out in what makes the batches; a pipeline does with .batch(..., last="drop"), '
        'or fills it up with .batch(..., last="pad")',
    )


def is_one_value(error: BaseException) -> bool:
    """Return whether this is BatchNorm's error for a single value per channel."""
    return isinstance(error, ValueError) and _ONE_VALUE in str(error)
