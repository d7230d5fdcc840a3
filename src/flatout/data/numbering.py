"""Sources that number their samples, so that features of samples may be stored."""

from __future__ import annotations

from flatout.data.execution.featured import Numbered
from flatout.data.pipeline import Pipeline
from flatout.data.source import Source
from flatout.data.sources.arrays.arrays import ArraySamples, ArraySource


def numbered(source: Source) -> Numbered | str:
    """Return the samples of a source by index, if a sample is always equal or has few variants.

    If not, return a text with the reason.
    """
    if isinstance(source, ArraySource):
        samples = ArraySamples(source.data)
        return Numbered(samples.rows, samples.inputs_content, comes_whole=True)
    if isinstance(source, Pipeline):
        return source.numbered()
    return "only arrays and data of flatout.data number their samples, not loaders and iterables"


def stays_with_rank(source: Source) -> bool:
    """Return whether a sample comes to the same rank in each epoch: no shuffle over ranks.

    Args:
        source: a source with numbered samples.
    """
    if isinstance(source, ArraySource):
        return not source.plan.shuffle
    if isinstance(source, Pipeline):
        return source.has_own_rows or not any(stage.reorders for stage in source.stages)
    return False
