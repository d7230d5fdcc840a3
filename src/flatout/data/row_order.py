"""Detection of a random order of rows."""

from __future__ import annotations

from typing import Any

from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from flatout.data.pipeline import Pipeline
from flatout.data.stages.shuffle import Shuffle

# Samplers of torch that draw a random order.
_DRAW = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)


def drawn_order(data: Any) -> str | None:
    """Return the name of the part that draws the order of rows at random, for the user.

    Return None if the rows come in stored order, or in the order of the user's own function.
    """
    if isinstance(data, Pipeline):
        shuffles = any(isinstance(stage, Shuffle) for stage in data.stages)
        return "the pipeline's shuffle" if shuffles else None
    if not isinstance(data, DataLoader):
        return None
    sampler = getattr(data.batch_sampler, "sampler", data.sampler)
    draws = isinstance(sampler, _DRAW)
    if isinstance(sampler, DistributedSampler):
        draws = sampler.shuffle
    return f"the DataLoader's {type(sampler).__name__}" if draws else None
