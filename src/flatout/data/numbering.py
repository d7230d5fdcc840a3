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
        return Numbered(samples.rows, samples.content)
    if isinstance(source, Pipeline):
        return source.numbered()
    return f"what makes a sample of a {type(source).__name__.removesuffix('Source')} is not known"
