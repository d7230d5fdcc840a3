"""A torch Dataset whose batches are made in the way that is measured to be fastest.

The ways are:

    asked for     in the main process, sample by sample; each run begins in this way;
    whole         a batch at once, if the Dataset returns equal samples for an array of indices;
    thread        ahead, in a thread of the process;
    processes     ahead, in worker processes

All ways make the same batches: the first batch of a candidate is compared with the batch of the
main process. A Dataset whose samples depend on time or process is only read by the main process.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from functools import cached_property
from itertools import islice
from time import perf_counter
from typing import Any, Literal

from torch.utils.data import DataLoader

from flatout.console import first_line
from flatout.data.batches.batch import Batch, named_tensors
from flatout.data.digests.reach import bound_to_training, own_generator, shared_by_fork
from flatout.data.execution.batch_sampler import BatchSampler
from flatout.data.randomness import batch_seed
from flatout.data.sources.datasets.dataset_source import (
    DatasetSource,
    Draw,
    WholeBatches,
    same_batch,
)
from flatout.data.workers.read_ahead import read_ahead
from flatout.data.workers.worker_tuner import Workers, WorkerTuner
from flatout.devices import read_shm
from flatout.measure import usable_cpus
from flatout.words import memory_words

# Number of batches that are checked for random draws before a thread may make batches.
_WATCHED = 32
# _ON_THEIR_WAY: maximum number of batches that each worker process has in /dev/shm. _SHM_LEAST:
# bytes of /dev/shm that must stay free.
_ON_THEIR_WAY, _SHM_LEAST = 4, 100e6
# A worker process counts as hanging if it returns nothing for SILENT_S seconds and for the usual
# time of _SILENT_BATCHES batches.
SILENT_S, _SILENT_BATCHES = 30.0, 50.0
OTHER_VALUES = "workers made other values of the same samples"
"""Reason why worker processes are not used."""


class TunedDatasetSource(DatasetSource):
    """A `DatasetSource` that finds the fastest way to make batches while batches are used.

    Args:
        workers: "auto", or "thread" to let a thread make batches from the start if possible.
        clock: returns the present time in seconds.

    Attributes:
        tuner: runs the trials and holds their outcomes.
    """

    def __init__(
        self,
        dataset: Any,
        plan: BatchSampler,
        *,
        workers: Literal["auto", "thread"] = "auto",
        pin_memory: bool = False,
        collate: Callable[[list[Any]], Any] | None = None,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        super().__init__(dataset, plan, pin_memory=pin_memory, collate=collate)
        fixed: Workers | None = "thread" if workers == "thread" else None
        self.tuner = WorkerTuner(_most_workers(), clock, fixed=fixed)
        self.fetch.watched = _WATCHED
        if collate is None and not hasattr(dataset, "__getitems__"):
            self.fetch.whole = WholeBatches(dataset, clock)
        self._clock = clock
        self._epochs: int | None = None
        self._passes = 0
        self._batch_bytes = 0

    def expect_epochs(self, total: int | None) -> None:
        """Set the number of epochs of the run: trials that it cannot repay are not started."""
        self._epochs = total

    def readers(self) -> str:
        """Return how samples are read, in words."""
        kept = self.tuner.settled
        if kept == 0:
            return "read by the main process"
        return "read ahead by a thread" if kept == "thread" else f"read by {kept} worker(s)"

    def peek(self, count: int) -> list[Batch]:
        """Return the first batches of epoch 0, which epoch 0 then still contains."""
        return list(islice(self.made(self._loader, 0, 0), count))

    def batches(self, epoch: int, start_step: int = 0) -> Iterator[Batch]:
        """Yield the batches of an epoch from `start_step` on. Only one pass may run at a time.

        Raises:
            DataError: the epoch has no such step; a sample cannot be read (its number is named), or
                samples do not form a batch.
        """
        self.plan.first(start_step)
        return self._tuned(epoch, start_step)

    @property
    def report(self) -> WorkerTuner:
        """The trials of how to make batches, and their outcomes."""
        return self.tuner

    def _tuned(self, epoch: int, step: int) -> Iterator[Batch]:
        tuner = self.tuner
        tuner.left = self._left(epoch, step)
        self._passes += 1
        self._look_at_whole_batches()
        tuner.begin()
        while step < self.plan.steps:
            if tuner.workers != 0 and (why := self._reason_against(tuner.workers)):
                tuner.refuse(tuner.workers, why)
            with closing(self._made_by(tuner.workers, epoch, step)) as made:
                for batch, waited in made:
                    step += 1
                    yield batch
                    if self._counted(waited):
                        break

    def _left(self, epoch: int, step: int) -> int:
        more = self._passes if self._epochs is None else self._epochs - epoch - 1
        return self.plan.steps - step + max(0, more) * self.plan.steps

    def _counted(self, waited: float) -> bool:
        """Count a used batch; return whether other workers make the next batches."""
        if not self.fetch.compares:
            return self.tuner.used(waited)
        self.tuner.not_counted()
        self._end_comparing()
        return False

    # -- whole batches ---------------------------------------------------------------------------

    def _look_at_whole_batches(self) -> None:
        """Compare whole batches in this pass, if later passes can use them."""
        whole = self.fetch.whole
        if whole is None or whole.why_not:
            return
        whole.begin_epoch()
        self.fetch.compares = (
            self.tuner.workers == 0
            and self.tuner.left > self.plan.steps
            and not (whole.are_all_known or self._against_any)
        )

    def _end_comparing(self) -> None:
        whole = self.fetch.whole
        assert whole is not None
        if self.fetch.draws:
            whole.give_up("samples draw random numbers")
        if whole.why_not:
            self.fetch.compares = False
            self.tuner.trials.append(f"whole batches: {whole.why_not}")
        elif whole.are_all_known:
            self.fetch.compares = False
            self.tuner.trials.append(whole.words)
            self.tuner.notes.append(f"{type(self.dataset).__name__} is asked for {whole.words}")

    # -- who makes the batches -------------------------------------------------------------------

    def _made_by(
        self, workers: Workers, epoch: int, step: int
    ) -> Generator[tuple[Batch, float], None, None]:
        # Made before a thread starts, which would use the Dataset at the same time.
        expected = self._asked_for(epoch, step) if self.tuner.is_trying and workers != 0 else None
        with closing(self._started(workers, epoch, step)) as made:
            while step < self.plan.steps:
                start = self._clock()
                try:
                    batch = next(made)
                except Exception as error:
                    if workers == 0:
                        raise
                    self.tuner.refuse(workers, f"they fail: {first_line(error)}")
                    return
                waited = self._clock() - start
                if not self._batch_bytes:
                    self._batch_bytes = sum(item.nbytes for _, item in named_tensors("", batch[:3]))
                if expected is not None and not same_batch(batch, expected):
                    self.tuner.refuse(workers, OTHER_VALUES)
                    return
                expected = None
                step += 1
                yield batch, waited

    def _started(self, workers: Workers, epoch: int, step: int) -> Generator[Batch, None, None]:
        if workers == 0:
            return self.made(self._loader, epoch, step)
        if workers == "thread":
            # Not seeded, since the training thread uses the same global generators.
            return read_ahead(self.made(self.loader(0), epoch, step, seeded=False))
        # Each pass starts new workers, which see changes of the Dataset between passes.
        timeout = max(SILENT_S, _SILENT_BATCHES * self.tuner.plain_s)
        loader = self.loader(workers, kind=_Loader, multiprocessing_context="fork", timeout=timeout)
        return self.made(loader, epoch, step)

    def _asked_for(self, epoch: int, step: int) -> Any:
        numbers = self.numbers(epoch, step)[0]
        return self.fetch.__getitems__(
            Draw(batch_seed(self.plan.seed, epoch, step), numbers.tolist())
        )

    def _reason_against(self, workers: Workers) -> str:
        if self._against_any:
            return self._against_any
        if workers == "thread":
            if self.fetch.watched == _WATCHED:
                self._asked_for(0, 0)
            return "samples draw random numbers, which a thread cannot" if self.fetch.draws else ""
        if self._against_processes:
            return self._against_processes
        shm = read_shm()
        needed = _SHM_LEAST + _ON_THEIR_WAY * workers * self._batch_bytes
        if shm is None or shm.free < needed:
            return f"/dev/shm has {memory_words(0 if shm is None else shm.free)} free, too little"
        return ""

    @cached_property
    def _against_any(self) -> str:
        return own_generator(self.dataset) or bound_to_training(self.dataset)

    @cached_property
    def _against_processes(self) -> str:
        return shared_by_fork(self.dataset)


class _Loader(DataLoader[Any]):
    """A DataLoader that gives no warning about more workers than CPUs, for slow I/O."""

    def check_worker_number_rationality(self) -> None:
        """Give no warning."""


def _most_workers() -> int:
    return max(2, 2 * usable_cpus()) if sys.platform == "linux" else 0
