"""Batches of a map-style torch Dataset, in Flatout's order.

Many Datasets return a whole batch for an array of indices, by chance: `return self.x[index],
self.y[index]` accepts an index or an array of indices. Such batches are only used for samples that
were made in both ways once, with equal bits.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Generator, Iterator
from functools import cached_property
from itertools import islice
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate, get_worker_info

from flatout.data.batches.batch import Batch, named_tensors
from flatout.data.batches.tensors import as_batch
from flatout.data.digests.reach import Attributes
from flatout.data.execution.batch_sampler import BatchSampler, check_workers
from flatout.data.randomness import batch_seed, random_state, same_state, seed_all, seeded
from flatout.data.sources.datasets.iterable import name_digest
from flatout.data.sources.datasets.worker_errors import named_faults, refuse_small_shm
from flatout.errors import DataError

# Minimum speedup, of a batch made at once over a batch made sample by sample, for which all samples
# are compared.
_WORTH = 4.0
# Seconds of a batch below which no faster way is needed.
_LEAST_S = 3e-4
# Epochs that found the Dataset changed, after which samples are not compared any more.
_CHANGES = 2


class WholeBatches:
    """Samples of a Dataset that are equal when a whole batch is made at once.

    Attributes:
        why_not: reason why whole batches are not used; empty while they may be.
    """

    def __init__(self, dataset: Any, clock: Callable[[], float] = perf_counter) -> None:
        self.why_not = ""
        self._dataset = dataset
        self.clock = clock
        self._same = np.zeros(len(dataset), bool)
        self._attributes: Attributes | None = None
        self._changes = 0
        self._one_by_one_s, self._at_once_s = 0.0, 1e-9

    @property
    def are_all_known(self) -> bool:
        """Whether every sample was compared and equal."""
        return bool(self._same.all())

    @property
    def words(self) -> str:
        ratio = self._one_by_one_s / self._at_once_s
        return (
            f"whole batches, made {ratio:.1f}x faster than sample by sample; all "
            f"{len(self._same):,} samples were compared bit for bit"
        )

    def begin_epoch(self) -> None:
        """Forget all comparisons if the Dataset has changed since."""
        if self._attributes is None or self.why_not:
            return
        changed = self._attributes.changed(self._dataset)
        if changed:
            self._same[:] = False
            self._attributes = Attributes(self._dataset)
            self._changes += 1
            if self._changes >= _CHANGES:
                self.give_up(f"{changed} is another one in each epoch")

    def take(self, numbers: list[int]) -> Any:
        """Return the batch of these samples made at once, or None before all are compared."""
        index = np.array(numbers, np.int64)
        if self.why_not or not self._same[index].all():
            return None
        try:
            return self._dataset[index]
        except Exception as error:
            self.give_up(f"asked for many samples at once it raises {type(error).__name__}")
            return None

    def compare(self, numbers: list[int], made: Any, made_s: float) -> None:
        """Make a batch at once, and record whether it equals the batch made sample by sample."""
        if made_s < _LEAST_S:
            self.give_up("batches are made quickly")
            return
        if self._attributes is None:
            self._attributes = Attributes(self._dataset)
        index = np.array(numbers, np.int64)
        start = self.clock()
        try:
            value = self._dataset[index]
        except Exception as error:
            self.give_up(f"asked for many samples at once it raises {type(error).__name__}")
            return
        self._one_by_one_s += made_s
        self._at_once_s += self.clock() - start
        if self._at_once_s * _WORTH > self._one_by_one_s:
            self.give_up("many samples at once take as long as one by one")
        elif same_batch(value, made):
            self._same[index] = True
        else:
            self.give_up("many samples at once are others than one by one")

    def give_up(self, why: str) -> None:
        self.why_not = why
        self._attributes = None


def same_batch(a: Any, b: Any) -> bool:
    """Return whether two values are the same batch: structure, dtypes and every bit."""
    try:
        parts = [list(named_tensors("", as_batch(batch, "a batch")[:3])) for batch in (a, b)]
    except DataError:
        return False
    first, second = parts
    return len(first) == len(second) and all(map(_is_same, first, second))


def _is_same(a: tuple[str, torch.Tensor], b: tuple[str, torch.Tensor]) -> bool:
    (name, one), (other_name, other) = a, b
    if (name, one.dtype, one.shape) != (other_name, other.dtype, other.shape):
        return False
    # Compared as bytes, so that a NaN equals itself and zeros differ by their sign.
    return torch.equal(
        *(t.contiguous().view(-1).view(torch.uint8) for t in (one.cpu(), other.cpu()))
    )


class Draw(NamedTuple):
    """A batch to make: its samples, and the seed of the global generators, or None."""

    seed: int | None
    indices: list[int]


class DatasetBatchSampler:
    """The batch sampler of a DatasetSource's loader. It lives as long as the loader's workers."""

    coming: Iterator[Draw] = iter(())

    def __iter__(self) -> Iterator[Any]:
        return self.coming


class Fetch(Dataset[Any]):
    """Makes whole batches, in a worker or in the main process.

    A worker returns an error as a value, because torch would build another exception from the
    traceback and lose the text for the user.

    Attributes:
        whole: makes batches at once if the result is equal; None if this is not tried.
        watched: number of further batches that are checked for random draws.
        draws: whether a checked batch drew from a global generator.
    """

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any]) -> None:
        self.dataset = dataset
        self.collate = collate
        self.whole: WholeBatches | None = None
        self.compares = False
        self.watched = 0
        self.draws = False

    def __getitems__(self, draw: Draw) -> Any:
        if draw.seed is None:
            return self._batch(draw.indices)
        if get_worker_info() is None:
            with seeded(draw.seed):
                return self._watched_batch(draw.indices)
        seed_all(draw.seed)
        try:
            return self._batch(draw.indices)
        except DataError as error:
            error.add_note(traceback.format_exc())
            return error

    def _watched_batch(self, indices: list[int]) -> Any:
        if not self.watched:
            return self._batch(indices)
        self.watched -= 1
        before = random_state()
        made = self._batch(indices)
        self.draws = self.draws or not same_state(before, random_state())
        return made

    def _batch(self, indices: list[int]) -> Any:
        whole = self.whole
        if whole is None or whole.why_not:
            return self._collated(indices)
        at_once = whole.take(indices)
        if at_once is not None:
            return at_once
        start = whole.clock()
        made = self._collated(indices)
        if self.compares:
            whole.compare(indices, made, whole.clock() - start)
        return made

    def _collated(self, indices: list[int]) -> Any:
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
            # Read samples one by one, to find the bad sample.
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


class DatasetSource:
    """Batches of a map-style torch Dataset.

    The samples of each batch depend on (seed, epoch), not on the number of workers. So do random
    augmentations that draw from torch's, Python's or numpy's global generators. These are seeded
    from (seed, epoch, step) while a batch is made, and restored afterwards in the main process.
    This does not hold for augmentations with their own generator.

    Attributes:
        dataset: the user's Dataset.
        plan: batch sampler that splits the data into batches.
    """

    seekable = True
    counted = True

    def __init__(
        self,
        dataset: Any,
        plan: BatchSampler,
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
        self.workers = check_workers(workers)
        self.fetch = Fetch(dataset, collate or default_collate)
        self._pin = pin_memory and torch.accelerator.is_available()
        # whether earlier batches were jagged; None before the first batch
        self._is_jagged: bool | None = None
        # The user's objects that are called, which `peek` does not change.
        self.own_parts = [dataset, collate]
        self._loader = self._new_loader()

    def _new_loader(self) -> DataLoader[Any]:
        return self.loader(self.workers, persistent_workers=self.workers > 0)

    def loader(
        self, workers: int, *, kind: type[DataLoader[Any]] = DataLoader, **options: Any
    ) -> DataLoader[Any]:
        """Return a DataLoader that makes the batches of its batch sampler."""
        return kind(
            self.fetch,
            batch_sampler=DatasetBatchSampler(),
            num_workers=workers,
            collate_fn=_as_it_is,
            pin_memory=self._pin,
            # Without its own generator, a DataLoader draws from the generator that dropout uses.
            generator=torch.Generator(),
            **options,
        )

    @cached_property
    def digest(self) -> str:
        """16 hex digits over the dataset's code and length: reading samples may take long."""
        return name_digest(self.dataset, len(self.dataset), self.fetch.collate)

    def describe(self) -> str:
        """Return one line for the user."""
        kind = type(self.dataset).__name__
        return f"{self.plan.samples:,} samples of {kind}, {self.plan.describe()}, {self.readers()}"

    def readers(self) -> str:
        """Return how samples are read, in words."""
        return f"read by {self.workers} worker(s)" if self.workers else "read by the main process"

    def labels_range(self) -> tuple[int, int] | None:
        """Return None: the targets are not in memory."""
        return None

    def peek(self, count: int) -> list[Batch]:
        """Return the first batches of epoch 0, which epoch 0 then still contains."""
        return list(islice(self.batches(0), count))

    def state_dict(self) -> dict[str, Any]:
        """Return an empty dict: (epoch, step) is the whole state."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Do nothing: there is no state."""

    def batches(self, epoch: int, start_step: int = 0) -> Iterator[Batch]:
        """Yield the batches of an epoch from `start_step` on. Only one pass may run at a time.

        Raises:
            DataError: the epoch has no such step; a sample cannot be read (its number is named), or
                samples do not form a batch.
        """
        self.plan.first(start_step)
        return self._read(epoch, start_step)

    def _read(self, epoch: int, start_step: int) -> Iterator[Batch]:
        try:
            yield from self.made(self._loader, epoch, start_step)
        except Exception:
            # End the workers now. The error's traceback may keep this source in a reference cycle,
            # and workers that only the garbage collector ends take seconds to end.
            self._loader = self._new_loader()
            raise

    def made(
        self, loader: DataLoader[Any], epoch: int, start_step: int, *, seeded: bool = True
    ) -> Generator[Batch, None, None]:
        """Yield the batches of an epoch as a loader makes them.

        Args:
            loader: DataLoader that `self.loader` returned.
            epoch: index of the epoch, from 0.
            start_step: number of the first batch.
            seeded: whether the global generators are seeded for each batch.
        """
        plan, first = self.plan, self.plan.first(start_step)
        if first >= plan.used:
            return
        wanted = self.numbers(epoch, start_step)
        loader.batch_sampler.coming = (  # type: ignore[union-attr]
            Draw(batch_seed(plan.seed, epoch, step) if seeded else None, numbers.tolist())
            for step, numbers in enumerate(wanted, start_step)
        )
        made = zip(named_faults(loader), wanted, strict=True)
        for step, (value, numbers) in enumerate(made, start_step):
            yield self._checked(value, numbers, f"epoch {epoch}, step {step}")

    def _checked(self, value: Any, indices: Tensor, where: str) -> Batch:
        if isinstance(value, DataError):
            raise value
        batch = as_batch(value, where, is_jagged=self._is_jagged)
        self._is_jagged = self._is_jagged or batch.is_jagged
        # A collate function may leave samples out; then the numbers of the other samples are not
        # known.
        return batch._replace(indices=indices if batch.size == len(indices) else None)

    def numbers(self, epoch: int, start_step: int) -> tuple[Tensor, ...]:
        """Return the samples of each batch of an epoch from `start_step` on; int64."""
        plan = self.plan
        order = torch.from_numpy(plan.order(epoch))
        return torch.split(order[plan.first(start_step) : plan.used], plan.batch_size)


def _as_it_is(batch: Any) -> Any:
    return batch
