"""Reading of an iterator ahead in a thread, or by processes, if that is faster."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from time import perf_counter
from typing import Any, Literal, TypeVar

from flatout.data.digests.reach import bound_to_training
from flatout.data.randomness import random_state, same_state
from flatout.data.workers.parallel import Ahead, Tuner
from flatout.data.workers.worker_tuner import (
    CERTAIN,
    START_S,
    WAIT,
    WORTH,
    Workers,
    WorkerTrial,
    words_of,
)

T = TypeVar("T")

# Items made ahead: one is used, one is ready, one is being made.
_DEPTH = 2
# First batches of an epoch that are not measured: they open files and warm up the training.
_NOT_COUNTED = 2
# Seconds of waiting in an epoch below which a thread saves nothing.
_LEAST_S = 0.05


def read_ahead(items: Iterator[T]) -> Generator[T, None, None]:
    end = object()

    def following(number: int) -> T | object:
        return next(items, end)

    ahead = Ahead(following, 0, 2**62, Tuner(1, threads=1, depth=_DEPTH))
    with closing(iter(ahead)) as made:
        for item in made:
            if item is end:
                return
            yield item  # type: ignore[misc]


class EpochReader:
    """Chooses, between epochs, whether a thread, processes or the training make the batches.

    In the first epoch each batch is made when training asks for it. If training waited for batches,
    a thread reads the next epoch ahead, and continues if its steps took less time. If training
    still waits and processes can make the batches, processes are tried in the same way.

    Args:
        workers: "auto" for this choice, "thread" for a thread if a thread may read, or the number
            of processes if processes can make the batches. Otherwise training makes the batches.
        maker: the object that makes the batches. Its code and attributes show whether a thread may
            read it.
        clock: returns the present time in seconds.
        most: the largest number of processes; 0 if processes cannot make the batches.
        against: returns the reason why processes would make different batches, or an empty text.

    Attributes:
        settled: chosen way: "thread", the number of processes, or 0 if training makes the batches.
        kept: measurement of the chosen way; None if `settled` is 0 or the user has chosen.
        trials: a line for each trial with its result.
        notes: lines for the user. The caller that prints them empties the list.
    """

    def __init__(
        self,
        workers: Workers | Literal["auto"],
        maker: Any,
        clock: Callable[[], float] = perf_counter,
        most: int = 0,
        against: Callable[[], str] = str,
    ) -> None:
        self.settled: Workers = 0
        self.kept: WorkerTrial | None = None
        self.trials: list[str] = []
        self.notes: list[str] = []
        self.epochs: int | None = None
        self.clock = clock
        self._maker = maker
        self._asked: Workers = 0
        if workers == "thread" or (workers != "auto" and most):
            self._asked = workers
        self._most, self._against = most, against
        # Candidates that are still to be tried, and the setting that a candidate is compared with.
        self._todo = ["thread", *(["processes"] if most else [])] if workers == "auto" else []
        self._before: Workers = 0
        self._before_s = self._plain_s = 0.0
        self._draws = False
        self._seconds = self._waited = self._start_s = self._last = 0.0
        self._batches = 0

    @property
    def is_asked(self) -> bool:
        """Whether the user has chosen where batches are made."""
        return self._asked != 0

    def starts(self) -> Workers:
        """Start an epoch, and return `settled` for it."""
        self._batches, self._seconds, self._waited, self._start_s = 0, 0.0, 0.0, 0.0
        self._last = self.clock()
        if self._asked != 0 and self.settled == 0 and not self.trials:
            if self._asked == "thread" and (why := bound_to_training(self._maker)):
                self._asked = 0
                self.notes.append(f"no thread reads ahead: {why}")
            self.settled = self._before = self._asked
        return self.settled

    def take(self, made: Iterator[T]) -> T | None:
        """Return the next batch, checked for random draws while that matters; None at the end."""
        # The first batch is not checked: opening draws an order, while the training thread waits.
        if not self._todo or self.settled != 0 or not self._batches:
            return next(made, None)
        before = random_state()
        batch = next(made, None)
        self._draws = self._draws or not same_state(before, random_state())
        return batch

    def used(self, waited_s: float) -> None:
        """Count a used batch, and the seconds of waiting for it."""
        now = self.clock()
        self._batches += 1
        if self._batches > _NOT_COUNTED:
            self._seconds += now - self._last
            self._waited += waited_s
        elif isinstance(self.settled, int) and self.settled:
            self._start_s += waited_s  # each epoch starts new processes
        self._last = now

    def refuse(self, why: str) -> None:
        """Note why neither a thread nor processes can read, and let training make all batches."""
        self.trials.append(f"{self._kind}: {why}")
        self.notes.append(f"batches are read when they are asked for again: {why}")
        self.settled, self._before, self.kept, self._todo = 0, 0, None, []

    def ended(self, epoch: int) -> None:
        """Evaluate the epoch that was just read, and choose the way for the next epoch."""
        counted = self._batches - _NOT_COUNTED
        if counted < 1 or not self._seconds or self.is_asked:
            return
        step_s, waited = (self._seconds + self._start_s) / counted, self._waited / self._seconds
        if self.settled != self._before:
            self._judge(step_s)
            return
        if self.settled == 0:
            self._plain_s = step_s
        elif self._plain_s < WORTH * step_s:
            self._put_back(0, self._plain_s / step_s)
            return
        self._before_s = step_s
        self._look(epoch, waited)

    def _look(self, epoch: int, waited: float) -> None:
        left = epoch + 1 if self.epochs is None else self.epochs - epoch - 1
        if waited <= WAIT or self._waited < _LEAST_S or left < 1 or not self._todo:
            return
        is_thread = self._todo[0] == "thread"
        if not is_thread and self._waited * left < CERTAIN * START_S:
            return
        why = "it draws random numbers" if self._draws else bound_to_training(self._maker)
        if not why and not is_thread:
            why = self._against()
        if why:
            self._todo = []
            self.trials.append(f"{'a thread' if is_thread else 'workers'}: {why}")
            return
        del self._todo[0]
        needed = math.ceil(waited / max(1e-9, 1 - waited))
        self.settled = "thread" if is_thread else max(1, min(self._most, needed))

    def _judge(self, step_s: float) -> None:
        ratio = self._before_s / step_s
        if ratio < WORTH:
            self._put_back(self._before, ratio)
            return
        self.kept = WorkerTrial(self._plain_s, step_s, 0.0)
        self.trials.append(f"{words_of(self.settled)}: {ratio:.2f}x, kept")
        self.notes.append(self.kept.words(self.settled))
        self._before, self._before_s = self.settled, step_s

    def _put_back(self, to: Workers, ratio: float) -> None:
        self.trials.append(f"{words_of(self.settled)}: {ratio:.2f}x, put back")
        self.settled = self._before = to
        self.kept = self.kept if to else None

    @property
    def _kind(self) -> str:
        return "a thread" if self.settled == "thread" else "workers"
