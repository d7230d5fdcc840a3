"""What a source of batches is, and how whatever a user hands over becomes one."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterable, Iterator
from typing import Any, Literal, Protocol

from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from flatout.data.batch import Batch
from flatout.data.execution.batch_sampler import DEFAULT_BATCH_SIZE, last_batch
from flatout.data.execution.digests import without_plain_values
from flatout.data.execution.worker_tuner import Workers, WorkerTrial
from flatout.data.pipeline import Pipeline
from flatout.data.sources.arrays import Arrays, array_source
from flatout.data.sources.dataset import dataset, from_loader
from flatout.data.sources.iterable import iterable
from flatout.data.tensors import are_arrays, is_array, parts_of
from flatout.errors import DataError


class Source(Protocol):
    """Batches, epoch after epoch.

    `batches(epoch, start_step)` gives exactly what a full pass over the epoch gives from that step
    on; where the source is not seekable, only in a process that has loaded the `state_dict`.

    Attributes:
        seekable: whether a pass can start at any step without reading what comes before.
        counted: whether `steps` is known.
        samples: samples per epoch, or None.
        steps: batches per epoch, or None.
        batch_size: samples per batch, or None.
        digest: 16 hex digits that differ for other data, for a resume to notice. Of the data
            alone, not of its order or batch size.
    """

    @property
    def seekable(self) -> bool:
        """Whether a pass can start at any step without reading what comes before."""
        ...

    @property
    def counted(self) -> bool:
        """Whether `steps` is known."""
        ...

    @property
    def samples(self) -> int | None:
        """Samples per epoch, or None."""
        ...

    @property
    def steps(self) -> int | None:
        """Batches per epoch, or None."""
        ...

    @property
    def batch_size(self) -> int | None:
        """Samples per batch, or None."""
        ...

    @property
    def digest(self) -> str:
        """16 hex digits that differ for other data."""
        ...

    def batches(self, epoch: int, start_step: int = 0) -> Iterator[Batch]:
        """The batches of an epoch from `start_step` on."""
        ...

    def peek(self, count: int) -> list[Batch]:
        """Up to `count` first batches of epoch 0, without using them or any random state up."""
        ...

    def describe(self) -> str:
        """One line for people."""
        ...

    def labels_range(self) -> tuple[int, int] | None:
        """Smallest and largest target, where the targets are one tensor of integers in memory."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """What a resume needs besides (epoch, step): empty where the source is seekable."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take what `state_dict` gave."""
        ...


class SourceReport(Protocol):
    """Who makes a source's batches, and how that was found while they were used.

    Attributes:
        settled: as `input.workers`.
        kept: what was measured of it; None where nothing was, or that is 0.
        trials: what was tried, and what came of it.
        notes: what the user should know of; the caller that shows them empties the list.
    """

    settled: Workers
    kept: WorkerTrial | None
    trials: list[str]
    notes: list[str]


def report_of(source: Source | None) -> SourceReport | None:
    """Who makes its batches, where that is found while they are used."""
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
    """Whatever a user hands over, as a Source.

    A tuple is x, (x, y) or (x, y, weight), where x and y may be tuples, lists or dicts of arrays. A
    list is a list of batches, unless `y` is given beside it. A bare array or dict of arrays is x.
    A TensorDataset takes the way of arrays. Sources, DataLoaders and iterables make their own
    batches: `batch_size` must be None or theirs, and the other options do not apply.

    Args:
        train: inputs, or all of the data.
        y: targets, where `train` is inputs alone.
        batch_size: samples per batch; None means 32, or all where there are fewer.
        shuffle: a new order every epoch, from (seed, epoch).
        seed: of the orders.
        drop_last: leave out a smaller last batch.
        workers: who makes the batches of a Dataset: 0 this process when they are asked for,
            "thread" a thread of it ahead, a number so many processes; "auto" begins with 0
            and keeps what is measured faster while batches are used. Of iterables and loaders
            without workers a thread may read ahead.
        pin_memory: batches in pinned memory, for copies to an accelerator; without one, no effect.
        clip_batch: a batch larger than the data becomes the data instead of an error.

    Raises:
        DataError: nothing here takes `train`, it is empty, its parts do not fit together, or a
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
    """Rows of an epoch's last batch, with what fills it up; None where that is not known."""
    if isinstance(source, Pipeline):
        return source.last_batch
    if source.samples is None or source.batch_size is None:
        return None
    # Of what is dropped `samples` does not say.
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
