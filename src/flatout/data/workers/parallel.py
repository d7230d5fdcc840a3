"""Items that several threads make ahead, returned in order."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from time import perf_counter
from typing import Generic, TypeVar

from flatout.data.reading.threads import say_fewer
from flatout.words import counted

T = TypeVar("T")

# Smallest speedup of the input for which an additional thread is used further.
_WORTH = 1.03
# Minimum number of items and seconds of a window that is measured.
_ITEMS, _SECONDS = 16, 0.25
# Minimum seconds of a measurement after which the fraction of waiting time is reported.
_TOO_LITTLE_S = 0.02
# Fraction of time that the consumer may wait for input before another thread is tried.
_WAIT = 0.03
# Seconds in which all threads together may end when the loop ends; a thread may wait for a pipe.
_PATIENCE_S = 5.0


class Tuner:
    """Finds, while running, the number of threads and of items that they make ahead.

    If the consumer waits for input, one more thread is tried for a window of items. It is kept if
    items came faster. If the consumer does not wait, one thread less is tried in the same way. The
    order of items does not depend on the number of threads, which is kept between epochs.

    Attributes:
        waited: fraction of the time that the consumer waited, in the latest window.
        rate: batches per second in the latest window.
        in_vain: whether another thread was tried and made nothing faster.
        trials: lines about each trial and its outcome.
    """

    def __init__(self, budget: int, threads: int | None = None, depth: int | None = None) -> None:
        self.budget = budget if threads is None else threads
        self.fixed = threads is not None
        self.threads = max(1, threads or 1)
        self._depth = depth
        self.waited = 0.0
        self.rate = 0.0
        self.judged = False
        self.in_vain = False
        self.trials: list[str] = []
        self._start = perf_counter()
        self._items = self._batches = 0
        self._wait = 0.0
        # _span: seconds of this window. _spans, _waits: seconds, and seconds of waiting, of all
        # windows before it.
        self._span = self._spans = self._waits = 0.0
        self._before: tuple[int, float] | None = None  # threads and rate before the present trial
        self._rest = 0  # windows until the next trial
        self._patience = 1

    @property
    def given_depth(self) -> bool:
        return self._depth is not None

    def depth(self, batches: int) -> int:
        """Return the maximum number of items to make ahead; each item holds `batches` batches.

        Large items are made fewer ahead: new items are then still in the processor's caches.
        """
        return self._depth or (2 if batches == 1 else 1) * self.threads + 1

    @property
    def waited_so_far(self) -> float | None:
        """Fraction of the time that the consumer waited: in the latest window, or since the start.

        None if too little time has passed.
        """
        if self.judged:
            return self.waited
        passed = self._spans + self._span
        return (self._waits + self._wait) / passed if passed > _TOO_LITTLE_S else None

    def restart(self) -> None:
        """Begin a window, such as at an epoch's start; earlier items no longer count."""
        self._spans += self._span
        self._waits += self._wait
        self._start, self._wait, self._span = perf_counter(), 0.0, 0.0
        self._items = self._batches = 0

    def consumed(self, waited: float, batches: int) -> bool:
        """Count an item of `batches` batches; return whether the number of threads has changed."""
        self._items += 1
        self._batches += batches
        self._wait += waited
        self._span = passed = perf_counter() - self._start
        if self._items < _ITEMS or passed < _SECONDS:
            return False
        self.rate, self.waited = self._batches / passed, self._wait / passed
        self.judged = True
        self.restart()
        return not self.fixed and self._judge(self.rate)

    def _judge(self, rate: float) -> bool:
        if self._before is not None:
            threads, before = self._before
            self._before = None
            more = self.threads > threads
            kept = rate > before * _WORTH if more else rate * _WORTH > before
            self.trials.append(
                f"{threads} -> {self.threads} threads: {rate / before:.2f}x, "
                f"{'kept' if kept else 'put back'}"
            )
            if kept:
                self._patience = 1
                return False
            self.in_vain = self.in_vain or more
            # After a failed trial, wait longer each time before the next trial.
            self.threads, self._rest = threads, self._patience
            self._patience = min(64, 2 * self._patience)
            return True
        if self._rest:
            self._rest -= 1
            return False
        if self.waited > _WAIT and self.threads < self.budget:
            self._before = (self.threads, rate)
            self.threads += 1
            return True
        if self.waited < _WAIT / 10 and self.threads > 1:
            self._before = (self.threads, rate)
            self.threads -= 1
            return True
        return False


class Ahead(Generic[T]):
    """Results of `make(first)`, ..., `make(last - 1)`, made by threads and returned in order.

    An error that `make` raises is raised at the position of its item.
    """

    def __init__(
        self,
        make: Callable[[int], T],
        first: int,
        last: int,
        tuner: Tuner,
        batches: int = 1,
        most: Callable[[], int] | None = None,
    ) -> None:
        self._make = make
        self._next, self._last = first, last
        self._due = first
        self._tuner = tuner
        self._batches = batches
        self._most = most
        self._made: dict[int, tuple[T | None, BaseException | None]] = {}
        lock = threading.Lock()
        self._ready = threading.Condition(lock)  # signals the consumer that the next item was made
        self._room = threading.Condition(lock)  # signals the threads that there is an item to make
        self._stopped = False
        self._threads: list[threading.Thread] = []

    def __iter__(self) -> Generator[T, None, None]:
        """Yield the items. Items made ahead are dropped if the loop ends early."""
        self._tuner.restart()
        self._start_missing()
        try:
            while self._due < self._last:
                item, waited = self._take()
                yield item
                if self._tuner.consumed(waited, self._batches):
                    self._start_missing()
        finally:
            self.close()

    def _take(self) -> tuple[T, float]:
        waited = 0.0
        if not self._threads and not self._stopped:
            self._make_here()
        with self._ready:
            if self._due not in self._made:
                start = perf_counter()
                while self._due not in self._made:
                    if self._stopped:
                        raise RuntimeError("the loop over these batches was closed")
                    self._ready.wait()
                waited = perf_counter() - start
            item, error = self._made.pop(self._due)
            self._due += 1
            self._room.notify()
        if error is not None:
            raise error
        return item, waited  # type: ignore[return-value]

    def _start_missing(self) -> None:
        """Start missing threads; surplus threads end by themselves."""
        with self._room:
            self._threads = [thread for thread in self._threads if thread.is_alive()]
            while len(self._threads) < self._tuner.threads:
                number = len(self._threads)
                thread = threading.Thread(
                    target=self._work, args=(number,), name=f"flatout-input-{number}", daemon=True
                )
                try:
                    thread.start()
                except RuntimeError as error:
                    self._go_on_with(number, str(error))
                    break
                self._threads.append(thread)
            self._room.notify_all()

    def _go_on_with(self, threads: int, why: str) -> None:
        self._tuner.threads, self._tuner.fixed = max(1, threads), True
        say_fewer(why, f"batches are made by {counted(threads, 'thread')}")

    def _make_here(self) -> None:
        try:
            self._made[self._due] = self._make(self._due), None
        except Exception as error:
            self._made[self._due] = None, error
        self._next = self._due + 1

    def _work(self, number: int) -> None:
        while True:
            with self._room:
                # A surplus thread must not wait: it would take a notice that is for another thread.
                while not self._over(number) and self._next >= self._due + self._depth():
                    self._room.wait()
                if self._over(number) or self._next >= self._last:
                    self._room.notify()  # the notice may have been for another thread
                    return
                at = self._next
                self._next += 1
            made: tuple[T | None, BaseException | None]
            try:
                made = self._make(at), None
            except BaseException as error:
                made = None, error
            with self._ready:
                self._made[at] = made
                if at == self._due:
                    self._ready.notify()
            del made

    def _depth(self) -> int:
        depth = self._tuner.depth(self._batches)
        return depth if self._most is None else min(depth, self._most())

    def _over(self, number: int) -> bool:
        return self._stopped or number >= self._tuner.threads

    def close(self) -> None:
        with self._room:
            self._stopped = True
            self._made.clear()
            self._room.notify_all()
            self._ready.notify_all()
        until = perf_counter() + _PATIENCE_S
        for thread in self._threads:
            # The garbage collector may call this in one of these threads.
            if thread is not threading.current_thread():
                thread.join(max(0.0, until - perf_counter()))
