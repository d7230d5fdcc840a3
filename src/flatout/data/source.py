"""Interface of sources of batches, and the conversion of a user's data into a source."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterable, Iterator
from typing import Any, Literal, Protocol

from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from flatout.data.batches.batch import Batch, map_tensors, named_tensors
from flatout.data.batches.tensors import are_arrays, is_array, parts_of
from flatout.data.digests.digests import without_plain_values
from flatout.data.execution.batch_sampler import DEFAULT_BATCH_SIZE, last_batch
from flatout.data.pipeline import Pipeline
from flatout.data.sources.arrays.arrays import Arrays, array_source
from flatout.data.sources.datasets.dataset import dataset, from_loader
from flatout.data.sources.datasets.iterable import iterable
from flatout.data.workers.worker_tuner import Workers, WorkerTrial
from flatout.errors import DataError


def with_parts(x: Any, y: Any, sample_weight: Any, share: float) -> tuple[Any, Any, Any]:
    """Return data with their weights, and the part of them that is held out for validation.

    Args:
        x: inputs, or all of the data.
        y: targets, where `x` has only inputs.
        sample_weight: one number per sample, or None.
        share: fraction of the samples to hold out, from the end; 0 for none.

    Returns:
        x and y for `as_source`, and the held-out data or None.

    Raises:
        DataError: weights or a fraction are given for data that are no arrays, weights are given
            twice, or a fraction leaves a part without samples.
    """
    if sample_weight is None and not share:
        return x, y, None
    if isinstance(x, Arrays) and y is None and sample_weight is None:
        split = _split(len(x), share)
        return x.part(0, split), None, x.part(split, len(x))
    parts = _parts(x, y, sample_weight)
    if not share:
        return parts, None, None
    first, last = split_validation(*parts, share)
    return first, None, last


def split_validation(x: Any, y: Any, sample_weight: Any, share: float) -> tuple[Any, Any]:
    """Return samples for training, and the fraction at the end for validation, as Keras does.

    Raises:
        DataError: the data are not arrays, or a part would be empty.
    """
    if not are_arrays(x):
        raise DataError(
            "validation_split needs arrays, whose end can be held out",
            do="pass validation_data; a pipeline has .split(), and torch.utils.data.random_split "
            "parts a Dataset",
        )
    split = _split(len(next(named_tensors("", x))[1]), share)
    first = tuple(map_tensors(lambda part: part[:split], part) for part in (x, y, sample_weight))
    last = tuple(map_tensors(lambda part: part[split:], part) for part in (x, y, sample_weight))
    return first, last


def _parts(x: Any, y: Any, sample_weight: Any) -> tuple[Any, Any, Any]:
    if y is None and isinstance(x, TensorDataset):
        x = x.tensors
    weight = None
    if y is None and isinstance(x, tuple):
        x, y, weight = parts_of(x)
    if weight is not None and sample_weight is not None:
        raise DataError("sample_weight was given beside data that have their own weights")
    if sample_weight is not None and not is_array(sample_weight):
        raise DataError(
            "sample_weight: expected a tensor or array with a number per sample, found a "
            f"{type(sample_weight).__name__}"
        )
    if sample_weight is not None and (not are_arrays(x) or y is None):
        raise DataError(
            f"sample_weight goes with arrays x and y, found a {type(x).__name__}",
            do="let it give (x, y, weight) itself",
        )
    return x, y, weight if sample_weight is None else sample_weight


def _split(samples: int, share: float) -> int:
    split = int(samples * (1 - share))
    if not 0 < split < samples:
        raise DataError(
            f"validation_split={share} leaves {split} of {samples} samples to train on",
            do="choose a share between 0 and 1 that leaves both parts at least one sample",
        )
    return split


class Source(Protocol):
    """Batches, epoch after epoch.

    `batches(epoch, start_step)` returns exactly the batches of a full pass from that step on. If
    the source is not seekable, this holds only in a process that has loaded the `state_dict`.
    """

    @property
    def seekable(self) -> bool:
        """Whether a pass can start at any step without reading earlier batches."""
        ...

    @property
    def counted(self) -> bool:
        """Whether `steps` is known."""
        ...

    @property
    def samples(self) -> int | None:
        """Number of samples per epoch; None if not known."""
        ...

    @property
    def steps(self) -> int | None:
        """Number of batches per epoch; None if not known."""
        ...

    @property
    def batch_size(self) -> int | None:
        """Number of samples per batch; None if not known."""
        ...

    @property
    def digest(self) -> str:
        """16 hex digits that differ for other data, whatever their order and batch size."""
        ...

    def batches(self, epoch: int, start_step: int = 0) -> Iterator[Batch]:
        """Return the batches of an epoch from `start_step` on."""
        ...

    def peek(self, count: int) -> list[Batch]:
        """Return the first `count` batches of epoch 0, without effect on it or random states."""
        ...

    def describe(self) -> str:
        """Return one line for the user."""
        ...

    def labels_range(self) -> tuple[int, int] | None:
        """Return the smallest and largest target, if they are integers in one tensor in memory."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resume needs in addition to (epoch, step); empty if seekable."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the result of `state_dict`."""
        ...


class SourceReport(Protocol):
    """Trials of how to make a source's batches, and the way that was found.

    Attributes:
        settled: chosen value, in the form of `input.workers`.
        kept: measurement of the chosen value; None if it was not measured or is 0.
        trials: lines about each trial and its outcome.
        notes: lines for the user; the caller that shows them empties the list.
    """

    settled: Workers
    kept: WorkerTrial | None
    trials: list[str]
    notes: list[str]


def report_of(source: Source | None) -> SourceReport | None:
    """Return the report of a source that finds out how to make batches, or None."""
    report: SourceReport | None = getattr(source, "report", None)
    return report


_TAKEN = (
    "take: x, (x, y) or (x, y, weight) of tensors or numpy arrays; a torch Dataset or DataLoader; "
    "an iterable of batches, or a function that returns one; a source of flatout.data"
)


def as_source(
    train: Any,
    y: Any = None,
    *,
    batch_size: int | None = None,
    shuffle: bool = True,
    seed: int = 0,
    drop_last: bool = False,
    workers: Workers | Literal["auto"] = "auto",
    pin_memory: bool = False,
    clip_batch: bool = False,
) -> Source:
    """Convert a user's data into a Source.

    A tuple is x, (x, y) or (x, y, weight), where x and y may be tuples, lists or dicts of arrays. A
    list is a list of batches, unless `y` is given. A single array or dict of arrays is x. A
    TensorDataset is handled like arrays. Sources, DataLoaders and iterables make their own batches:
    `batch_size` must be None or equal to their batch size. All other options are ignored.

    Args:
        train: inputs, or all of the data.
        y: targets, if `train` has only inputs.
        batch_size: samples per batch; None means 32, or all samples if there are fewer.
        shuffle: whether each epoch has a new order, from (seed, epoch).
        seed: seed of the orders.
        drop_last: leave out a smaller last batch.
        workers: how the batches of a Dataset are made. 0: by this process when they are needed;
            "thread": ahead, by a thread; a number: by this number of processes; "auto": starts with
            0 and keeps the fastest while batches are used. For iterables and loaders without
            workers, a thread may read ahead.
        pin_memory: batches in pinned memory, for copies to an accelerator; without one, no effect.
        clip_batch: a batch larger than the data becomes the data instead of an error.

    Raises:
        DataError: `train` has an unknown type or is empty, its parts do not fit together, or a
            number makes no sense.
    """
    options: dict[str, Any] = {
        "batch_size": batch_size,
        "shuffle": shuffle,
        "seed": seed,
        "drop_last": drop_last,
        "pin_memory": pin_memory,
        "clip_batch": clip_batch,
    }
    if y is not None:
        if not are_arrays(train):
            raise DataError(
                f"y goes with arrays, and {type(train).__name__} is none",
                do="let it give (x, y) itself",
            )
        return array_source(train, y, **options)
    if isinstance(train, Pipeline):
        return _of_pipeline(train, batch_size, clip_batch)
    if isinstance(train, Arrays) or is_array(train) or isinstance(train, dict):
        return array_source(train, **options)
    if type(train) is TensorDataset and len(train.tensors) <= 3:
        return array_source(*train.tensors, **options)
    if isinstance(train, tuple):
        return array_source(*parts_of(train), **options)
    if isinstance(train, Dataset) and not _is_source(train):
        return dataset(train, workers=workers, **options)
    return _made_elsewhere(train, batch_size, workers)


def _of_pipeline(train: Pipeline, batch_size: int | None, clip_batch: bool) -> Source:
    samples = train.rows_to_cut
    if train.in_batches:
        made = _made_elsewhere(train, batch_size, 0)
        if made.batch_size is not None and samples is not None:
            if not clip_batch:
                _check_not_larger(made.batch_size, samples)
            if made.steps == 0:
                raise DataError(
                    f'batch({made.batch_size:,}, last="drop") drops all of the {samples:,} samples',
                    do='use last="keep"',
                )
        return made
    size = DEFAULT_BATCH_SIZE if batch_size is None else batch_size
    if samples is not None and samples < size:
        if batch_size is not None and not clip_batch:
            _check_not_larger(size, samples)
        size = samples
    return train.batch(size)


def _check_not_larger(size: int, samples: int) -> None:
    if size > samples:
        raise DataError(
            f"the batch is larger than the data: batch_size is {size:,}, but there are "
            f"{samples:,} samples",
            do=f"lower batch_size to at most {samples:,}",
        )


def _made_elsewhere(
    train: Any, batch_size: int | None, workers: Workers | Literal["auto"]
) -> Source:
    if _is_source(train):
        source: Source = train
    elif isinstance(train, DataLoader):
        source = from_loader(train, workers)
    elif isinstance(train, (str, bytes, os.PathLike)):
        is_folder = not isinstance(train, bytes) and os.path.isdir(train)
        read = "images(path, size=224)" if is_folder else "csv(path)"
        raise DataError(
            f"found the path {train!r}, expected data",
            do=f"read it first, for example with flatout.data.{read}",
        )
    elif isinstance(train, Iterable) or (
        callable(train) and not isinstance(train, (type, nn.Module))
    ):
        source = iterable(train, workers=workers)
    else:
        raise DataError(f"nothing here reads {type(train).__name__} as data", do=_TAKEN)
    if batch_size is not None and source.batch_size not in (None, batch_size):
        raise DataError(
            f"batch_size is {batch_size}, but the {type(train).__name__} makes its own batches of "
            f"{source.batch_size}",
            do="drop batch_size, or pass the dataset itself",
        )
    return source


def last_batch_of(source: Source) -> int | None:
    """Return the rows of an epoch's last batch, with rows that fill it up, or None if not known."""
    if isinstance(source, Pipeline):
        return source.last_batch
    if source.samples is None or source.batch_size is None:
        return None
    # `samples` does not include dropped samples.
    return last_batch(source.samples, source.batch_size, drop_last=False)


def loose_digest(source: Any) -> str:
    """Return a source's digest without numbers and texts that its code reads, such as a rank."""
    digest = inspect.getattr_static(type(source), "digest", source.digest)
    make = getattr(digest, "func", None) or getattr(digest, "fget", None)
    with without_plain_values():
        return source.digest if make is None else str(make(source))


def _is_source(value: Any) -> bool:
    wanted = ("batches", "peek", "describe", "labels_range", "state_dict", "load_state_dict")
    return all(callable(getattr(type(value), name, None)) for name in wanted)
