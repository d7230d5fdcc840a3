"""Facts about a source: targets, numbered samples, random order, and the files that it reads."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from flatout.data.execution.featured import Numbered
from flatout.data.execution.samples import told_targets
from flatout.data.pipeline import Pipeline
from flatout.data.source import Source
from flatout.data.sources.arrays.arrays import ArraySamples, ArraySource
from flatout.data.sources.datasets.dataset_source import DatasetSource
from flatout.data.stages.shuffle import Shuffle
from flatout.errors import DataError


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


# Maximum number of files whose sizes and times are read.
_MOST_ASKED = 10_000


@dataclass(frozen=True)
class FilesRead:
    """Counts of files.

    Attributes:
        files: number of files.
        bytes: bytes of all files; None if there are too many files to read their sizes.
        newest: time of the last write to any file, in Unix seconds; None as for `bytes`.
    """

    files: int
    bytes: int | None
    newest: float | None


def files_read(source: Any) -> FilesRead | None:
    """Count the files of a Pipeline, or of the pipelines that it mixes; None without files."""
    paths = list(dict.fromkeys(_paths(getattr(source, "origin", None))))
    if not paths:
        return None
    if len(paths) > _MOST_ASKED:
        return FilesRead(len(paths), None, None)
    sizes, times = [], []
    for path in paths:
        with suppress(OSError):  # the file was deleted
            stat = os.stat(path)
            sizes.append(stat.st_size)
            times.append(stat.st_mtime)
    return FilesRead(len(paths), sum(sizes), max(times, default=None))


def _paths(origin: Any) -> list[str]:
    parts = getattr(origin, "parts", None)
    if parts is not None:
        return [path for part in parts for path in _paths(getattr(part, "origin", None))]
    paths = getattr(origin, "paths", None)
    if paths is None:
        paths = [file.path for file in getattr(origin, "files", ())]
    return [os.fspath(path) for path in paths]


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
