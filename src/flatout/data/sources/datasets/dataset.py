"""torch Datasets in Flatout's order, and DataLoaders as their users built them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from functools import cached_property
from itertools import islice
from types import FunctionType
from typing import Any, Literal

import torch
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data._utils.fetch import _MapDatasetFetcher

from flatout.data.digests.reach import own_generator, shared_by_fork
from flatout.data.execution.batch_sampler import (
    DEFAULT_BATCH_SIZE,
    batches_of,
    check_batch_size,
    check_workers,
)
from flatout.data.execution.samples import Fetched
from flatout.data.pipeline import Pipeline
from flatout.data.planner import FirstSamples
from flatout.data.randomness import batch_seed
from flatout.data.sources.datasets.dataset_source import DatasetSource, same_batch
from flatout.data.sources.datasets.iterable import IterableSource, length_of, name_digest
from flatout.data.sources.datasets.kept_workers import KeptWorkers
from flatout.data.sources.datasets.tuned_dataset import OTHER_VALUES, SILENT_S, TunedDatasetSource
from flatout.data.sources.datasets.worker_errors import named_faults
from flatout.data.stages import Options
from flatout.data.workers.read_ahead import EpochReader
from flatout.data.workers.worker_tuner import Workers
from flatout.errors import DataError
from flatout.measure import usable_cpus


class DatasetRows:
    """Samples of a Dataset by index. Their structure is known once a sample was made."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self.rows = len(dataset)

    @cached_property
    def digest(self) -> str:
        return name_digest(self.dataset, self.rows)

    def begin(self, options: Options, say: Callable[[str], None]) -> FirstSamples:
        return FirstSamples(Fetched(self.dataset, self.digest))

    def describe(self) -> str:
        return f"{self.rows:,} samples of {type(self.dataset).__name__}"


def torch_dataset(dataset: Any) -> Pipeline:
    """Return samples of a Dataset: x, (x, y) or (x, y, weight), as tensors, arrays or numbers.

    `Trainer.fit` and `as_source` also take a map-style Dataset directly; use this to apply stages.
    A Dataset that draws from the global generators, as augmentations do, runs in the thread that
    iterates.

    Raises:
        DataError: the Dataset has no samples, or no length.
    """
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        raise DataError(
            f"expected a Dataset with __getitem__, found {type(dataset).__name__}",
            do="pass an IterableDataset to fit as it is, or in a DataLoader",
        )
    if len(dataset) == 0:
        raise DataError("the dataset is empty: expected at least 1 sample, found 0")
    return Pipeline(DatasetRows(dataset))


def dataset(
    samples: Any,
    *,
    batch_size: int | None = None,
    shuffle: bool = True,
    seed: int = 0,
    drop_last: bool = False,
    workers: Workers | Literal["auto"] = "auto",
    pin_memory: bool = False,
    clip_batch: bool = False,
    collate: Callable[[list[Any]], Any] | None = None,
) -> DatasetSource | IterableSource:
    """Return batches of a torch Dataset, map-style or iterable.

    Args:
        samples: the Dataset; a sample is x, (x, y) or (x, y, weight).
        batch_size: samples per batch; None means 32, or all samples if there are fewer. The next
            arguments are also as for `as_source`.
        shuffle: whether each epoch has a new order. An iterable Dataset has its own order.
        seed: seed of the orders and of random augmentation.
        workers: how samples are read. 0: by this process when they are needed; "thread": ahead, by
            a thread; a number: by this number of processes; "auto": starts with 0 and keeps the
            fastest while batches are used. An iterable Dataset is read by one process at most,
            since each of several would return all samples. It is read by several if its class
            calls `get_worker_info` to split the samples. Processes are kept over epochs if the
            Dataset can be copied.
        collate: makes a batch from a list of samples; torch's `default_collate` if None.

    Raises:
        DataError: the dataset is empty or has no length, or a number makes no sense.
    """
    if isinstance(samples, IterableDataset):
        return _iterable_dataset(samples, batch_size, seed, drop_last, workers, pin_memory, collate)
    if not hasattr(samples, "__getitem__") or not hasattr(samples, "__len__"):
        raise DataError(
            f"{type(samples).__name__}: expected a Dataset with __getitem__ and __len__",
            do="define both, or make it a torch.utils.data.IterableDataset",
        )
    plan = batches_of(
        len(samples),
        batch_size=batch_size,
        shuffle=shuffle,
        seed=seed,
        drop_last=drop_last,
        clip_batch=clip_batch,
    )
    if workers == "auto" or workers == "thread":
        return TunedDatasetSource(
            samples, plan, workers=workers, pin_memory=pin_memory, collate=collate
        )
    return DatasetSource(samples, plan, workers=workers, pin_memory=pin_memory, collate=collate)


def _iterable_dataset(
    samples: IterableDataset[Any],
    batch_size: int | None,
    seed: int,
    drop_last: bool,
    workers: Workers | Literal["auto"],
    pin_memory: bool,
    collate: Callable[[list[Any]], Any] | None,
) -> IterableSource:
    generator = torch.Generator()
    processes = check_workers(workers) if isinstance(workers, int) else 0
    if processes > 1 and not _splits_samples(samples):
        processes = 1
    loader: DataLoader[Any] = DataLoader(
        samples,
        batch_size=check_batch_size(DEFAULT_BATCH_SIZE if batch_size is None else batch_size),
        drop_last=drop_last,
        num_workers=processes,
        collate_fn=collate,
        pin_memory=pin_memory and torch.accelerator.is_available(),
        generator=generator,
    )
    # Each of several processes may end with a smaller batch, so the number is not known.
    steps = length_of(loader) if processes < 2 else None

    kept = KeptWorkers(loader) if processes else None

    def begin(epoch: int) -> Iterator[Any]:
        _set_epoch(epoch, samples)
        if kept is not None:
            return kept.epoch(batch_seed(seed, epoch, 0))
        generator.manual_seed(batch_seed(seed, epoch, 0))
        return iter(loader)

    return IterableSource(
        begin,
        name=f"batches of {type(samples).__name__}, in its own order",
        digest=lambda: name_digest(samples, length_of(samples), collate),
        steps=steps,
        samples=_samples_per_epoch(loader, steps),
        batch_size=loader.batch_size,
        reader=None if processes else EpochReader(workers, samples),
        own_parts=[samples, collate],
    )


def _splits_samples(samples: IterableDataset[Any]) -> bool:
    own = [value for kind in type(samples).__mro__ for value in vars(kind).values()]
    codes = [value.__code__ for value in own if isinstance(value, FunctionType)]
    return any("get_worker_info" in code.co_names for code in codes)


def from_loader(loader: DataLoader[Any], workers: Workers | Literal["auto"] = 0) -> IterableSource:
    """Return the batches of a DataLoader as its user built it: its order, batches and workers.

    Calls `set_epoch` of its sampler (or of an iterable dataset) where it has one.
    """
    batch_sampler = getattr(loader, "batch_sampler", None)
    samplers = (loader.sampler, batch_sampler, getattr(batch_sampler, "sampler", None))
    iterable = isinstance(loader.dataset, IterableDataset)
    steps = length_of(loader)
    if steps == 0:
        raise DataError(
            f"the DataLoader gives no batches: its batch_size is {loader.batch_size}, drop_last is "
            f"{loader.drop_last}, and its dataset has {length_of(loader.dataset)} samples"
        )

    def begin(epoch: int) -> Generator[Any, None, None]:
        _set_epoch(epoch, *samplers, *([loader.dataset] if iterable else []))
        return named_faults(loader)

    reader = None
    if not loader.num_workers:
        most = usable_cpus() if _can_be_copied(loader) else 0
        reader = EpochReader(workers, loader, most=most, against=lambda: _against_copies(loader))

    def begin_apart(epoch: int, workers: int) -> Generator[Any, None, None]:
        _set_epoch(epoch, *samplers)
        compares = reader is not None and not reader.is_asked
        return _made_by_processes(loader, workers, compares=compares)

    def peek(count: int) -> list[Any]:
        is_new = getattr(loader, "_iterator", None) is None
        with closing(begin(0)) as batches:
            found = list(islice(batches, count))
        if is_new:
            # Workers that persist have drawn random numbers, and later passes would draw none for
            # them.
            loader._iterator = None
        return found

    generators = {
        id(g): g for g in (getattr(part, "generator", None) for part in (loader, *samplers))
    }
    return IterableSource(
        begin,
        name=f"batches of a DataLoader of {type(loader.dataset).__name__}, as it makes them",
        digest=lambda: name_digest(
            loader.dataset, length_of(loader.dataset), loader.collate_fn, *samplers
        ),
        steps=steps,
        samples=_samples_per_epoch(loader, steps),
        batch_size=loader.batch_size,
        generators=[g for g in generators.values() if isinstance(g, torch.Generator)],
        reader=reader,
        begin_apart=begin_apart,
        peek=peek,
        own_parts=[loader.dataset, loader.collate_fn, *samplers],
    )


def _can_be_copied(loader: DataLoader[Any]) -> bool:
    """Return whether worker processes can make the same batches as a loader without workers."""
    is_mapped = not isinstance(loader.dataset, IterableDataset) and loader.batch_sampler is not None
    return is_mapped and type(loader) is DataLoader and sys.platform == "linux"


def _against_copies(loader: DataLoader[Any]) -> str:
    """Return why copies of a loader's dataset would give other samples, or an empty text."""
    parts = (loader.dataset, loader.collate_fn)
    return next((why for part in parts if (why := own_generator(part) or shared_by_fork(part))), "")


def _made_by_processes(
    loader: DataLoader[Any], workers: int, *, compares: bool
) -> Generator[Any, None, None]:
    """Yield the batches of a map-style loader without workers, made by processes in its order."""
    assert loader.batch_sampler is not None
    drawn = _Drawn(loader.batch_sampler)
    apart: DataLoader[Any] = DataLoader(
        loader.dataset,
        batch_sampler=drawn,
        num_workers=workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        generator=loader.generator,
        multiprocessing_context="fork",
        timeout=SILENT_S,
    )
    for step, batch in enumerate(named_faults(apart)):
        if compares and step == 0:
            here = _MapDatasetFetcher(loader.dataset, True, loader.collate_fn, False)
            if not same_batch(batch, here.fetch(drawn.first)):  # type: ignore[no-untyped-call]
                raise DataError(OTHER_VALUES)
        yield batch


class _Drawn:
    def __init__(self, batches: Iterable[list[int]]) -> None:
        self._batches = batches
        self.first: list[int] = []

    def __iter__(self) -> Iterator[list[int]]:
        for step, numbers in enumerate(self._batches):
            if step == 0:
                self.first = numbers
            yield numbers


def _samples_per_epoch(loader: DataLoader[Any], steps: int | None) -> int | None:
    if loader.batch_size is None:
        return None
    if loader.drop_last and steps is not None:
        return steps * loader.batch_size
    return length_of(
        loader.dataset if isinstance(loader.dataset, IterableDataset) else loader.sampler
    )


def _set_epoch(epoch: int, *parts: Any) -> None:
    for part in {id(part): part for part in parts}.values():
        if hasattr(part, "set_epoch"):
            part.set_epoch(epoch)
