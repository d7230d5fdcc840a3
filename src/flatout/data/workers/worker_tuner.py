"""Finds the value of `input.workers` that makes batches fastest, while batches are used.

If training waits for batches, a candidate makes the batches of one window. Then the earlier maker
makes those of another window. The candidate is kept if it was faster than both (A B A).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Literal, NamedTuple, TypeAlias

from flatout.words import counted, rounded

# As `input.workers` of a Recipe: 0 makes a batch when it is needed, "thread" makes batches ahead in
# a thread of the process, and a number is the number of worker processes.
Workers: TypeAlias = int | Literal["thread"]

# Fraction of time spent waiting for batches from which on candidates are tried.
WAIT = 0.1
# Smallest speedup for which a candidate is used further.
WORTH = 1.05
# A window ends after _SECONDS or more, and after _BATCHES batches or, where batches are slow,
# _LONG_S seconds.
_BATCHES, _LONG_S, _SECONDS = 16, 4.0, 0.25
# If a candidate's speedup is at least _CLEARLY, the window after it needs only _FEW_BATCHES
# batches.
_CLEARLY, _FEW_BATCHES = 1.5, 4
# START_S: maximum seconds that the start of worker processes takes. CERTAIN: workers are tried only
# if they can save this many times START_S.
START_S, CERTAIN = 2.0, 2.0
# Minimum number of windows of batches left in the run for which a trial starts. The trial itself
# takes two windows, and the batches after it must repay it.
_TRIALS_WINDOWS = 4
# Factor by which a candidate may slow down steps before its trial is ended early.
_HOPELESS = 3.0
# Consecutive windows slower than without workers, after which 0 workers are tried again.
_PATIENCE = 2


class WorkerTrial(NamedTuple):
    """Seconds from one batch to the next, before and with the workers that are kept.

    Attributes:
        before_s: seconds per batch before the trial.
        after_s: seconds per batch in the trial.
        floor: fraction by which the windows before and after the trial differed.
    """

    before_s: float
    after_s: float
    floor: float

    @property
    def ratio(self) -> float:
        return self.before_s / self.after_s

    def words(self, workers: Workers) -> str:
        before, after = rounded(1e3 * self.before_s), rounded(1e3 * self.after_s)
        return (
            f"{words_of(workers)}: steps are {self.ratio:.2f}x faster, {after} ms for {before} ms; "
            "same batches"
        )


@dataclass
class _Window:
    """Batches that are measured together.

    Attributes:
        skip: number of first batches that are not measured, since batches made ahead fill up.
        needed: minimum number of batches to measure.
        batches: number of batches measured so far.
        seconds: seconds of these batches.
        waited: seconds of waiting for these batches.
        in_all: number of batches so far, including skipped batches.
        in_all_s: seconds of these batches.
    """

    skip: int
    needed: int = _BATCHES
    batches: int = 0
    seconds: float = 0.0
    waited: float = 0.0
    in_all: int = 0
    in_all_s: float = 0.0

    def add(self, seconds: float, waited: float) -> None:
        self.in_all += 1
        self.in_all_s += seconds
        if self.in_all > self.skip:
            self.batches += 1
            self.seconds += seconds
            self.waited += waited

    @property
    def is_over(self) -> bool:
        is_long = self.seconds >= _LONG_S and self.batches * _LONG_S >= self.needed
        return self.seconds >= _SECONDS and (self.batches >= self.needed or is_long)


@dataclass
class _Trial:
    """Trial of a candidate against the earlier maker of batches."""

    candidate: Workers
    before_s: float
    tried_s: float | None = None


class WorkerTuner:
    """Decides after each window of batches how the next batches are made.

    Attributes:
        workers: workers that make the next batches.
        settled: workers that are used outside trials.
        kept: measurement of these workers; None if they are 0.
        plain_s: seconds from one batch to the next without workers, at the latest measurement.
        left: number of batches that remain in the run.
        waited: fraction of time spent waiting in the latest window; None before the first window.
        trials: lines about each trial and its outcome.
        notes: lines for the user; the caller that shows them empties the list.
    """

    def __init__(
        self,
        most: int,
        clock: Callable[[], float] = perf_counter,
        *,
        fixed: Workers | None = None,
    ) -> None:
        self.workers: Workers = fixed or 0
        self.settled: Workers = fixed or 0
        self.kept: WorkerTrial | None = None
        self.left = 0
        self.waited: float | None = None
        self.trials: list[str] = []
        self.notes: list[str] = []
        self._most = most
        self._clock = clock
        self._last = clock()
        self._is_fixed = fixed is not None
        # kinds of candidates that are still to be tried
        self._threads, self._processes = True, most > 0
        self._trial: _Trial | None = None
        self.plain_s = 0.0
        self._slower, self._patience = 0, _PATIENCE
        self._window = _Window(skip=1)

    @property
    def is_trying(self) -> bool:
        """Whether a candidate makes the next batches."""
        return self.workers != self.settled

    def begin(self) -> None:
        self._last = self._clock()

    def used(self, waited_s: float) -> bool:
        """Count a used batch; return whether other workers make the next batches."""
        now = self._clock()
        self._window.add(now - self._last, waited_s)
        self._last = now
        self.left -= 1
        if self._is_hopeless():
            return self._put_back(self._window.in_all_s / self._window.in_all)
        if not self._window.is_over:
            return False
        return self._judge(self._window.seconds / self._window.batches)

    def refuse(self, workers: Workers, why: str) -> None:
        """Stop using workers of this kind (thread or processes): they cannot make batches."""
        is_thread = workers == "thread"
        self._threads, self._processes = (
            self._threads and not is_thread,
            is_thread and self._processes,
        )
        self.trials.append(f"{'a thread' if is_thread else 'workers'}: {why}")
        if self.settled == workers:
            self.notes.append(f"batches are made when they are asked for again: {why}")
            self.settled, self.kept = 0, None
        self._trial = None
        self._go_on_with(self.settled)

    def not_counted(self) -> None:
        """Count a used batch whose time is not measured."""
        self._last = self._clock()
        self.left -= 1

    # -- deciding --------------------------------------------------------------------------------

    def _judge(self, step_s: float) -> bool:
        window, trial = self._window, self._trial
        self.waited = window.waited / window.seconds
        if self.workers == 0:
            self.plain_s = step_s
        if trial is None:
            return self._look(step_s, self.waited)
        if trial.tried_s is None:
            if step_s * WORTH >= trial.before_s:
                return self._put_back(step_s)
            trial.tried_s = step_s
            self._go_on_with(self.settled)
            if trial.before_s >= _CLEARLY * step_s:
                self._window.needed = _FEW_BATCHES
            return True
        self._trial = None
        ratio = min(trial.before_s, step_s) / trial.tried_s
        if ratio < WORTH:
            self._tell_trial(trial.candidate, ratio, "put back")
            return self._go_on_with(self.settled)
        return self._keep(trial, trial.tried_s, step_s)

    def _look(self, step_s: float, waited: float) -> bool:
        if self._is_fixed:
            return self._go_on()
        if self.settled != 0:
            self._slower = self._slower + 1 if step_s > self.plain_s * WORTH else 0
            if self._slower >= self._patience:
                self._slower = 0
                return self._try(0, step_s)
        candidate = self._next(step_s, waited) if waited > WAIT else None
        return self._go_on() if candidate is None else self._try(candidate, step_s)

    def _next(self, step_s: float, waited: float) -> Workers | None:
        if self.left < _TRIALS_WINDOWS * self._window.batches:
            return None
        # While a thread makes a batch, another is used: a step takes the longer of the two times.
        longer = max(waited, 1 - waited)
        if self._threads and self.settled == 0 and longer * WORTH <= 1:
            self._threads = False
            return "thread"
        needed = self._needed(waited)
        saves_s = self.left * step_s * min(waited, 1 - 1 / (needed + 1))
        if not self._processes or saves_s < CERTAIN * START_S:
            return None
        # A larger number is tried later, if these workers win and training still waits.
        self._processes = needed < self._most
        return needed

    def _needed(self, waited: float) -> int:
        if isinstance(self.settled, int) and self.settled > 0:
            return min(self._most, 2 * self.settled)
        making = waited if self.settled == 0 else 1.0
        return max(1, min(self._most, math.ceil(making / max(1e-9, 1 - waited))))

    def _try(self, candidate: Workers, step_s: float) -> bool:
        self._trial = _Trial(candidate, step_s)
        return self._go_on_with(candidate)

    def _is_hopeless(self) -> bool:
        if not self.is_trying or self._trial is None:
            return False
        window = self._window
        expected_s = START_S + _HOPELESS * window.in_all * self._trial.before_s
        return window.in_all_s > expected_s

    def _put_back(self, step_s: float) -> bool:
        assert self._trial is not None
        self._tell_trial(self.workers, self._trial.before_s / step_s, "put back")
        # 0 workers are still the fastest, though all workers have become slower
        if self.workers == 0:
            self._patience *= 2
        elif self.workers != "thread":
            self._processes = False
        self._trial = None
        return self._go_on_with(self.settled)

    def _keep(self, trial: _Trial, tried_s: float, again_s: float) -> bool:
        candidate, before_s = trial.candidate, min(trial.before_s, again_s)
        ratio = before_s / tried_s
        self._tell_trial(candidate, ratio, "kept")
        if candidate == 0:
            self.kept = None
            self._processes = self._processes and self.settled == "thread"
            self.notes.append(f"{words_of(0)} again: that is {ratio:.2f}x faster now")
        else:
            self.kept = WorkerTrial(before_s, tried_s, abs(again_s / trial.before_s - 1))
            self.notes.append(self.kept.words(candidate))
        self.settled = candidate
        return self._go_on_with(candidate)

    def _go_on_with(self, workers: Workers) -> bool:
        self.workers = workers
        ahead = 1 if workers == 0 else 3 if workers == "thread" else 2 * workers + 2
        processes = workers if isinstance(workers, int) else 0
        self._window = _Window(skip=ahead, needed=max(_BATCHES, 4 * processes))
        return True

    def _go_on(self) -> bool:
        self._window = _Window(skip=0, needed=self._window.needed)
        return False

    def _tell_trial(self, workers: Workers, ratio: float, outcome: str) -> None:
        self.trials.append(f"{words_of(workers)}: {ratio:.2f}x, {outcome}")


def words_of(workers: Workers) -> str:
    """Return how batches are made, in words."""
    if workers == "thread":
        return "a thread makes batches ahead"
    if workers == 0:
        return "batches are made when they are asked for"
    return f"{counted(workers, 'worker')} make{'s' if workers == 1 else ''} batches"
