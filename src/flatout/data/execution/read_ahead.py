"""An iterator's items, read ahead by one thread where that is faster."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from time import perf_counter
from typing import Any, Literal, TypeVar

from flatout.data.execution.parallel import Ahead, Tuner
from flatout.data.execution.reach import bound_to_training
from flatout.data.execution.worker_tuner import WAIT, WORTH, Workers, WorkerTrial, words_of
from flatout.data.randomness import random_state, same_state

T = TypeVar("T")

# One is used, one is ready, one is being made.
_DEPTH = 2
# The first batches of an epoch open files and warm up what trains.
_NOT_COUNTED = 2
# Waiting less than this in an epoch is not worth a thread.
_LEAST_S = 0.05


def read_ahead(items: Iterator[T], depth: int = _DEPTH) -> Generator[T, None, None]:
    """The same items in the same order; an error comes where its item would have come.

    Args:
        items: read by another thread from its first item on.
        depth: the most that are ready before they are asked for.
    """
    end = object()

    def following(number: int) -> T | object:
        return next(items, end)

    ahead = Ahead(following, 0, 2**62, Tuner(1, threads=1, depth=depth))
    with closing(iter(ahead)) as made:
        for item in made:
            if item is end:
                return
            yield item  # type: ignore[misc]


class EpochReader:
    """Decides between epochs whether a thread reads an iterator's batches ahead.

    The first epoch is read when batches are asked for. Where these were waited for, a thread reads
    the next one, and goes on with it if its steps took less time.

    Args:
        workers: "auto" for that, "thread" for a thread where one may read; else none does.
        maker: what makes the batches: its code and attributes show whether a thread may.
        clock: returns seconds.

    Attributes:
        settled: "thread" where one reads, or 0.
        kept: what was measured of it; None where that is 0 or was asked for.
        trials: what was tried, and what came of it.
        notes: what the user should know of; the caller that shows them empties the list.
    """

    def __init__(
        self,
        workers: Workers | Literal["auto"],
        maker: Any,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        self.settled: Workers = 0
        self.kept: WorkerTrial | None = None
        self.trials: list[str] = []
        self.notes: list[str] = []
        self.epochs: int | None = None
        self.clock = clock
        self._maker = maker
        self._is_open = workers == "auto"
        self._is_asked = workers == "thread"
        self._draws = False
        self._plain_s = self._seconds = self._waited = self._last = 0.0
        self._batches = 0

    def starts_ahead(self) -> bool:
        """An epoch begins; returns whether a thread is to read it."""
        self._begin()
        if self._is_asked:
            self._is_asked = False
            if why := bound_to_training(self._maker):
                self.notes.append(f"no thread reads ahead: {why}")
            else:
                self.settled = "thread"
        return self.settled == "thread"

    def take(self, made: Iterator[T]) -> T | None:
        """The next batch, watched for random draws as long as that matters; None at the end."""
        # The first one opens what draws an order, while the thread that trains waits for it.
        if not self._is_open or self.settled != 0 or not self._batches:
            return next(made, None)
        before = random_state()
        batch = next(made, None)
        self._draws = self._draws or not same_state(before, random_state())
        return batch

    def used(self, waited_s: float) -> None:
        """Count a batch that was used, and seconds that were waited for it."""
        now = self.clock()
        self._batches += 1
        if self._batches > _NOT_COUNTED:
            self._seconds += now - self._last
            self._waited += waited_s
        self._last = now

    def refuse(self, why: str) -> None:
        """No thread can read."""
        self.settled, self.kept, self._is_open = 0, None, False
        self.trials.append(f"a thread: {why}")
        self.notes.append(f"batches are read when they are asked for again: {why}")

    def ended(self, epoch: int) -> None:
        """An epoch was read as a whole."""
        counted = self._batches - _NOT_COUNTED
        if counted < 1 or not self._seconds or not self._is_open:
            return
        step_s, waited = self._seconds / counted, self._waited / self._seconds
        if self.settled == "thread":
            self._judge(step_s)
        else:
            self._plain_s = step_s
            self._look(epoch, waited)

    def _look(self, epoch: int, waited: float) -> None:
        is_last = self.epochs is not None and epoch + 1 >= self.epochs
        if waited <= WAIT or self._waited < _LEAST_S or is_last:
            return
        why = "it draws random numbers" if self._draws else bound_to_training(self._maker)
        if why:
            self._is_open = False
            self.trials.append(f"a thread: {why}")
        else:
            self.settled = "thread"

    def _judge(self, step_s: float) -> None:
        ratio = self._plain_s / step_s
        if ratio < WORTH:
            self.settled, self.kept, self._is_open = 0, None, False
            self.trials.append(f"{words_of('thread')}: {ratio:.2f}x, put back")
        elif self.kept is None:
            self.kept = WorkerTrial(self._plain_s, step_s, 0.0)
            self.trials.append(f"{words_of('thread')}: {ratio:.2f}x, kept")
            self.notes.append(self.kept.words("thread"))

    def _begin(self) -> None:
        self._batches, self._seconds, self._waited = 0, 0.0, 0.0
        self._last = self.clock()
