"""Making of one batch of a torch Dataset, in a worker or in the main process."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from torch.utils.data import Dataset, get_worker_info

from flatout.data.randomness import random_state, same_state, seed_all, seeded
from flatout.data.sources.datasets.whole_batches import WholeBatches
from flatout.data.sources.datasets.worker_errors import refuse_small_shm
from flatout.errors import DataError


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
