"""Targets of all samples of an epoch, to count classes."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt

from flatout.data.execution.samples import told_targets
from flatout.data.pipeline import Pipeline
from flatout.data.source import Source
from flatout.data.sources.arrays.arrays import ArraySource
from flatout.data.sources.datasets.dataset_source import DatasetSource
from flatout.errors import DataError


def epoch_targets(source: Source) -> npt.NDArray[Any]:
    """Return the target of each sample of epoch 0, shape (samples, ...).

    If each rank has its own samples, these are this rank's targets. Images of class folders are not
    decoded for this; samples of a user's `map` are made.

    Raises:
        DataError: targets are not known without reading all batches, or a sample does not have
            exactly one target.
    """
    if isinstance(source, Pipeline):
        return source.targets()
    result = None
    if isinstance(source, ArraySource):
        result = source.data.label_array()
    elif isinstance(source, DatasetSource):
        result = told_targets(source.dataset)
    if result is None:
        raise DataError(
            "the classes cannot be counted without reading all batches",
            where=source.describe(),
            do="pass the weights, as class_weight={0: 1.0, 1: 5.0}; or data whose targets are "
            "known: arrays, files, class folders, or a Dataset with class numbers in `targets`",
        )
    return result
