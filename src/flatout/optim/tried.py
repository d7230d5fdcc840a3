"""The largest batches of the publications on large-batch methods, and warnings beyond them.

Large batches can reach the same training loss and still generalize worse (Keskar et al. 2017), and
no rule holds for all models and data (Shallue et al. 2019). So the user gets one warning if the
batch is larger, or an epoch has fewer steps, than in the publications.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from flatout.optim.adapter import name_of
from flatout.optim.lamb import Lamb
from flatout.optim.lars import Lars
from flatout.optim.rates import LrScale


class PublishedBatch(NamedTuple):
    """The largest batch of a publication, and the steps of an epoch with this batch."""

    source: str
    batch: int
    steps_per_epoch: int


# ImageNet has 1,281,167 images.
GOYAL = PublishedBatch("Goyal et al. 2017: SGD, ResNet-50, ImageNet", 8_192, 156)
LARS = PublishedBatch("You et al. 2017: LARS, ResNet-50, ImageNet", 32_768, 39)
LAMB = PublishedBatch("You et al. 2020: LAMB, BERT and ResNet-50", 32_768, 39)
# Largest ratio of batch to reference batch in Goyal et al. 2017: from 256 to 8,192 samples.
_TIMES_TRIED = 32
# Largest ratio of batch to reference batch that is usual (Krizhevsky 2014: from 128 to 1,024).
_TIMES_USUAL = 8
_ADAPTIVE = ("ada", "rmsprop", "lamb", "lion")
_CHECK = "compare the validation figures with those of a smaller batch"


def warnings_of(
    optimizer: torch.optim.Optimizer,
    scale: LrScale | None,
    batch: int | None,
    steps_per_epoch: int | None,
) -> list[str]:
    """Return warnings for a user of a rule, of LARS or of LAMB; none without these.

    Args:
        optimizer: the job's optimizer.
        scale: the effect of the user's rule, or None.
        batch: samples of one optimizer step, of all ranks, or None if unknown.
        steps_per_epoch: optimizer steps, or None.
    """
    warnings = []
    if scale is not None and scale.changes:
        if scale.rule.rule == "linear" and is_adaptive(optimizer):
            warnings.append(
                f"the linear rule was found for SGD; for {name_of(optimizer)} theory and "
                "experiments speak for 'sqrt' (Malladi et al. 2022)"
            )
        times = batch / scale.rule.reference_batch if batch else 1.0
        if times > _TIMES_TRIED:
            warnings.append(
                f"the batch is {times:.4g} times the one that the learning rate was found with; "
                f"rules were tried up to {_TIMES_TRIED} times (Goyal et al. 2017), and beyond, "
                f"accuracy fell: {_CHECK}"
            )
        if times > _TIMES_USUAL and not isinstance(optimizer, Lars | Lamb):
            warnings += _beyond(GOYAL, batch, steps_per_epoch)
    if isinstance(optimizer, Lars | Lamb):
        tried = LARS if isinstance(optimizer, Lars) else LAMB
        warnings += _beyond(tried, batch, steps_per_epoch) or [
            f"{name_of(optimizer)} is for very large batches; it was tried up to {tried.batch:,} "
            f"samples ({tried.source}), and larger batches may generalize worse: {_CHECK}"
        ]
    return warnings


def is_adaptive(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the optimizer divides each weight's step by the size of its gradients."""
    return any(word in name_of(optimizer).lower() for word in _ADAPTIVE)


def _beyond(tried: PublishedBatch, batch: int | None, steps_per_epoch: int | None) -> list[str]:
    result = []
    if batch is not None and batch > tried.batch:
        result.append(f"a batch of {batch:,}, tried up to {tried.batch:,}")
    if steps_per_epoch is not None and steps_per_epoch < tried.steps_per_epoch:
        result.append(
            f"{steps_per_epoch:,} steps an epoch, tried down to {tried.steps_per_epoch:,}"
        )
    if not result:
        return []
    return [
        f"{' and '.join(result)} ({tried.source}): training may need more epochs and may "
        f"generalize worse; {_CHECK}"
    ]
