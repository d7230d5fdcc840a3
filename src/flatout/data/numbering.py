"""Which sources have samples whose features may be kept."""

from __future__ import annotations

from flatout.data.execution.featured import Numbered
from flatout.data.pipeline import Pipeline
from flatout.data.source import Source
from flatout.data.sources.arrays import ArraySamples, ArraySource


def numbered(source: Source) -> Numbered | str:
    """Its samples by number, where each is the same in all epochs or has a few variants.

    Returns a text where it is not so: why.
    """
    if isinstance(source, ArraySource):
        samples = ArraySamples(source.data)
        return Numbered(samples.rows, samples.inputs_content, comes_whole=True)
    if isinstance(source, Pipeline):
        return source.numbered()
    return "only arrays and data of flatout.data number their samples, not loaders and iterables"


def stays_with_rank(source: Source) -> bool:
    """Whether a sample comes to the same rank in each epoch: where nothing is shuffled over ranks.

    Args:
        source: whose samples are numbered.
    """
    if isinstance(source, ArraySource):
        return not source.plan.shuffle
    if isinstance(source, Pipeline):
        return source.has_own_rows or not any(stage.reorders for stage in source.stages)
    return False
