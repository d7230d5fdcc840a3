"""torch Datasets in our own order, and DataLoaders as their users built them."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from functools import cached_property
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate, get_worker_info

from flatout.data.batch import Batch
from flatout.data.order import batch_seed
from flatout.data.plan import (
    DEFAULT_BATCH_SIZE,
    Plan,
    check_batch_size,
    check_workers,
    plan_batches,
)
from flatout.data.randomness import seed_all, seeded
from flatout.data.sources.iterable import IterableSource, length_of, name_digest
from flatout.data.sources.worker_faults import named_faults, refuse_small_shm
from flatout.data.tensors import as_batch
from flatout.errors import DataError


class DatasetSource:
    """Batches of a map-style torch Dataset.

    Which samples form which batch is a function of (seed, epoch), whatever the number of workers.
    So are random augmentations that draw from torch's, Python's or numpy's global generators: while
    a batch is made these are seeded from (seed, epoch, step), and in the main process put back
    afterwards. Augmentations with a generator of their own are beyond that.

    Attributes:
        dataset: the user's.
        plan: how it is cut into batches.
    """

    seekable = True
    counted = True

    def __init__(
        self,
        dataset: Any,
        plan: Plan,
        *,
        workers: int = 0,
        pin_memory: bool = False,
        collate: Callable[[list[Any]], Any] | None = None,
    ) -> None:
        self.dataset = dataset
        self.plan = plan
        self.batch_size: int | None = plan.batch_size
        self.steps: int | None = plan.steps
        self.samples: int | None = plan.used
        self._draws = _Draws()
        self._fetch = _Fetch(dataset, collate or default_collate)
        self._workers = check_workers(workers)
        self._pin = pin_memory and torch.accelerator.is_available()
        self._loader = self._new_loader()

    def _new_loader(self) -> DataLoader[Any]:
        return DataLoader(
            self._fetch,
            batch_sampler=self._draws,
            num_workers=self._workers,
            collate_fn=_as_it_is,
            pin_memory=self._pin,
            persistent_workers=self._workers > 0,
            # Without one of its own, a DataLoader draws from the generator that dropout uses.
            generator=torch.Generator(),
        )

    @cached_property
    def digest(self) -> str:
        """16 hex digits over the dataset's code and length: reading samples may cost much."""
        return name_digest(self.dataset, len(self.dataset), self._fetch.collate)

    def describe(self) -> str:
        """One line for people."""
        kind = type(self.dataset).__name__
        readers = f"{self._workers} worker(s)" if self._workers else "the main process"
        return f"{self.plan.samples:,} samples of {kind}, {self.plan.describe()}, read by {readers}"

    def labels_range(self) -> tuple[int, int] | None:
        """None: the targets are not in memory."""
        return None

    def peek(self, count: int) -> list[Batch]:
        """The first batches of epoch 0, without using anything up."""
        return list(islice(self.batches(0), count))

    def state_dict(self) -> dict[str, Any]:
        """Nothing: (epoch, step) says it all."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to load."""

    def batches(self, epoch: int, start_step: int = 0) -> Iterator[Batch]:
        """The batches of an epoch from `start_step` on; one pass at a time.

        Raises:
            DataError: the epoch has no such step; a sample cannot be read (its number is named), or
                samples do not form a batch.
        """
        return self._read(epoch, start_step, self.plan.first(start_step))

    def _read(self, epoch: int, start_step: int, first: int) -> Iterator[Batch]:
        plan, order = self.plan, torch.from_numpy(self.plan.order(epoch))
        wanted = torch.split(order[first : plan.used], plan.batch_size)
        self._draws.coming = (
            _Draw(batch_seed(plan.seed, epoch, step), indices.tolist())
            for step, indices in enumerate(wanted, start_step)
        )
        if first >= plan.used:
            return
        made = enumerate(zip(named_faults(self._loader), wanted, strict=True), start_step)
        try:
            for step, (value, indices) in made:
                yield _checked(value, indices, f"epoch {epoch}, step {step}")
        except Exception:
            # Ends the workers now. The error's traceback may keep this source in a reference cycle,
            # and workers that only the garbage collector ends take seconds to go.
            del made
            self._loader = self._new_loader()
            raise


def _checked(value: Any, indices: Tensor, where: str) -> Batch:
    if isinstance(value, DataError):
        raise value
    batch = as_batch(value, where)
    # A collate function may leave samples out; then nobody knows which are left.
    return batch._replace(indices=indices if batch.size == len(indices) else None)


class _Draw(NamedTuple):
    """What a worker needs to make one batch."""

    seed: int
    indices: list[int]


class _Draws:
    """The batch sampler of a DatasetSource's loader, which lives as long as its workers do."""

    coming: Iterator[_Draw] = iter(())

    def __iter__(self) -> Iterator[Any]:
        return self.coming


class _Fetch(Dataset[Any]):
    """Makes whole batches, in a worker or in the main process.

    A failure in a worker comes back as a value, because torch would rebuild the exception around
    its traceback and lose what it says for people.
    """

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any]) -> None:
        self.dataset = dataset
        self.collate = collate

    def __getitems__(self, draw: _Draw) -> Any:
        if get_worker_info() is None:
            with seeded(draw.seed):
                return self._batch(draw.indices)
        seed_all(draw.seed)
        try:
            return self._batch(draw.indices)
        except DataError as error:
            error.add_note(traceback.format_exc())
            return error

    def _batch(self, indices: list[int]) -> Any:
        samples = self._samples(indices)
        try:
            return self.collate(samples)
        except Exception as error:
            refuse_small_shm(error)
            raise DataError(
                f"the samples do not form a batch: {type(error).__name__}: {error}",
                where=f"samples {indices}",
                do="let the dataset give tensors, arrays or numbers of equal shapes, or hand a "
                "collate function to flatout.data.dataset",
            ) from error

    def _samples(self, indices: list[int]) -> list[Any]:
        at_once = getattr(self.dataset, "__getitems__", None)
        if at_once is None:
            return [self._sample(index) for index in indices]
        try:
            return list(at_once(indices))
        except Exception as error:
            # One by one, to name the culprit.
            for index in indices:
                self._sample(index)
            raise DataError(
                f"the samples cannot be read together: {type(error).__name__}: {error}",
                where=f"samples {indices}",
            ) from error

    def _sample(self, index: int) -> Any:
        try:
            return self.dataset[index]
        except Exception as error:
            frame = traceback.extract_tb(error.__traceback__)[-1]
            raise DataError(
                f"sample {index} cannot be read: {type(error).__name__}: {error}",
                where=f"{frame.filename}:{frame.lineno}",
            ) from error


def _as_it_is(batch: Any) -> Any:
    return batch


def dataset(
    samples: Any,
    *,
    batch_size: int | None = None,
    shuffle: bool = True,
    seed: int = 0,
    drop_last: bool = False,
    workers: int = 0,
    pin_memory: bool = False,
    clip_batch: bool = False,
    collate: Callable[[list[Any]], Any] | None = None,
) -> DatasetSource | IterableSource:
    """Batches of a torch Dataset, map-style or iterable.

    Args:
        samples: the Dataset; a sample is x, (x, y) or (x, y, weight).
        batch_size: samples per batch; None means 32, or all where there are fewer.
        shuffle: a new order every epoch, from (seed, epoch). An iterable Dataset has its own order.
        seed: of the orders and of random augmentation.
        drop_last: leave out a smaller last batch.
        workers: processes that read samples; 0 reads in this one. An iterable Dataset is read by
            one at most, because several would each give all of its samples.
        pin_memory: batches in pinned memory, for copies to an accelerator; without one, no effect.
        clip_batch: a batch larger than the data becomes the data instead of an error.
        collate: makes a batch from a list of samples; torch's `default_collate` where it is None.

    Raises:
        DataError: the dataset is empty or has no length, or a number makes no sense.
    """
    if isinstance(samples, IterableDataset):
        return _iterable_dataset(
            samples, batch_size, seed, drop_last, check_workers(workers), pin_memory, collate
        )
    if not hasattr(samples, "__getitem__") or not hasattr(samples, "__len__"):
        raise DataError(
            f"{type(samples).__name__}: expected a Dataset with __getitem__ and __len__",
            do="define both, or make it a torch.utils.data.IterableDataset",
        )
    plan = plan_batches(
        len(samples),
        batch_size=batch_size,
        shuffle=shuffle,
        seed=seed,
        drop_last=drop_last,
        clip_batch=clip_batch,
    )
    return DatasetSource(samples, plan, workers=workers, pin_memory=pin_memory, collate=collate)


def _iterable_dataset(
    samples: IterableDataset[Any],
    batch_size: int | None,
    seed: int,
    drop_last: bool,
    workers: int,
    pin_memory: bool,
    collate: Callable[[list[Any]], Any] | None,
) -> IterableSource:
    generator = torch.Generator()
    loader: DataLoader[Any] = DataLoader(
        samples,
        batch_size=check_batch_size(DEFAULT_BATCH_SIZE if batch_size is None else batch_size),
        drop_last=drop_last,
        num_workers=min(workers, 1),
        collate_fn=collate,
        pin_memory=pin_memory and torch.accelerator.is_available(),
        # A new worker every epoch: one that lives on would never hear of set_epoch.
        persistent_workers=False,
        generator=generator,
    )
    steps = length_of(loader)

    def begin(epoch: int) -> Iterator[Any]:
        generator.manual_seed(batch_seed(seed, epoch, 0))
        _set_epoch(epoch, samples)
        return iter(loader)

    return IterableSource(
        begin,
        name=f"batches of {type(samples).__name__}, in its own order",
        digest=lambda: name_digest(samples, length_of(samples), collate),
        steps=steps,
        samples=_samples_per_epoch(loader, steps),
        batch_size=loader.batch_size,
    )


def from_loader(loader: DataLoader[Any]) -> IterableSource:
    """A DataLoader as its user built it: its order, its batches, its workers.

    `set_epoch` of its sampler (or of an iterable dataset) is called where there is one.

    Raises:
        DataError: it gives no batches.
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

    def begin(epoch: int) -> Iterator[Any]:
        _set_epoch(epoch, *samplers, *([loader.dataset] if iterable else []))
        return named_faults(loader)

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
    )


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
