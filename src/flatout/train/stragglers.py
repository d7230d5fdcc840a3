"""Detection of the rank that other ranks wait for, and of the lane that makes this rank slow.

A rank's own time is its time without waiting in collectives. Where all ranks wait for one another
in each step, total step times are equal and show no difference.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from time import perf_counter_ns as clock
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from flatout.measure import Timeline
from flatout.train.part import Done, Part, Step
from flatout.words import rounded
from flatout.world import CollectiveLog, World

# A rank is named if both limits are exceeded. _RATIO: the rank's own time divided by the median of
# the other ranks. _ERRORS: the rank's excess over this median, in standard errors.
_RATIO, _ERRORS = 1.2, 4.0
# Minimum and maximum number of groups of consecutive steps over which own times are averaged.
_FEWEST, _MOST = 8, 64
# _NOT_OWN: lanes that are not in a rank's own time. _WORDS: descriptions of lanes with unclear
# names.
_NOT_OWN = ("sync", "evaluation")
_GOES_ON = "their steps do not wait for it"
_WORDS = {
    "gc": "garbage collection",
    "host": "reading and logging",
    "idle": "what runs between steps, such as callbacks,",
}


class Pace(Part):
    """Records marks after steps: the clock and the total wait for other ranks."""

    def __init__(self, log: CollectiveLog) -> None:
        self._log = log
        self.reset()

    def reset(self) -> None:
        """Delete all marks."""
        self._marks: list[tuple[int, int]] = []
        self._steps, self._every = 0, 1

    def after_step(self, step: Step, done: Done) -> None:
        """Mark the step. All ranks keep the marks of the same steps."""
        if self._steps % self._every == 0:
            self._marks.append((clock(), self._log.waited))
            if len(self._marks) > 2 * _MOST:
                self._marks = self._marks[::2]
                self._every *= 2
        self._steps += 1

    def own_ms(self) -> list[float]:
        """Return this rank's own time per step in ms, in each group of steps between two marks."""
        spans = np.diff(np.array(self._marks, dtype=np.int64).reshape(-1, 2), axis=0)
        own: list[float] = ((spans[:, 0] - spans[:, 1]) / self._every / 1e6).tolist()
        return own


class Times(NamedTuple):
    """Times that one rank sends to the other ranks at the end of an epoch.

    Attributes:
        host: host of the rank.
        lanes: ms per step in this epoch, by lane.
        own_ms: own time per step in ms, in each group of consecutive steps of the epoch.
        notes: notes for the user.
    """

    host: str
    lanes: dict[str, float]
    own_ms: list[float]
    notes: list[str]


class RankTimes:
    """Compares the ranks of a fit after each epoch."""

    def __init__(
        self,
        world: World,
        timeline: Timeline,
        pace: Pace,
        *,
        alike: bool = True,
        waits: bool = True,
    ) -> None:
        self._world, self._timeline, self._pace = world, timeline, pace
        self._alike, self._waits = alike, waits
        self._before: dict[str, float] = {}
        self._steps_before = 0
        self._named: set[tuple[tuple[int, ...], str]] = set()

    def end_epoch(self, notes: list[str]) -> list[str]:
        """Exchange times and notes with all ranks, and return the notes; all ranks call it."""
        steps = self._timeline.steps
        totals = {lane: ms * steps for lane, ms in self._timeline.lanes().items()}
        new = max(1, steps - self._steps_before)
        lanes = {lane: (ms - self._before.get(lane, 0.0)) / new for lane, ms in totals.items()}
        self._before, self._steps_before = totals, steps
        own = Times(socket.gethostname(), lanes, self._pace.own_ms(), notes)
        self._pace.reset()
        gathered = self._world.gather(tuple(own), "the ranks' times, after an epoch")
        result = [Times(*times) for times in gathered]
        all_notes = [note for times in result for note in times.notes]
        slow = straggler(result, self._waits) if self._alike else None
        if slow is not None and (slow.ranks, slow.lane) not in self._named:
            self._named.add((slow.ranks, slow.lane))
            all_notes.append(slow.words)
        return all_notes


class Straggler(NamedTuple):
    """Ranks that other ranks wait for.

    Attributes:
        ranks: numbers of the slow ranks, the slowest first.
        lane: the lane with the slowest rank's largest excess.
        words: a line that reports the slow ranks to the user.
    """

    ranks: tuple[int, ...]
    lane: str
    words: str


def straggler(times: Sequence[Times], waits: bool = True) -> Straggler | None:
    """Return the ranks that are clearly slower than the other ranks, or None."""
    stretches = min(len(of_rank.own_ms) for of_rank in times)
    if stretches < _FEWEST or len(times) == 1:
        return None
    own = np.array([of_rank.own_ms[:stretches] for of_rank in times])
    slow = sorted((r for r in range(len(own)) if _is_slow(own, r)), key=lambda r: -own[r].mean())
    if not slow:
        return None
    rank = slow[0]
    mine, theirs = float(own[rank].mean()), float(_others(own, rank).mean())
    lane, here, there = _slow_lane([of_rank.lanes for of_rank in times], rank)
    more = f", as {'does' if len(slow) == 2 else 'do'} {_listed(slow[1:])}" if slow[1:] else ""
    return Straggler(
        tuple(slow),
        lane,
        f"rank {rank} (host {times[rank].host}) needs {mine / theirs:.1f}x as long as the others"
        f"{more}: {_WORDS.get(lane, lane)} takes {rounded(here)} ms of its "
        f"{rounded(mine)} ms step, {rounded(there)} ms on the others; "
        + (f"all wait {rounded(mine - theirs)} ms for it in each step" if waits else _GOES_ON),
    )


def _is_slow(own: npt.NDArray[np.float64], rank: int) -> bool:
    excess = own[rank] - _others(own, rank)
    error = excess.std(ddof=1) / np.sqrt(len(excess))
    is_longer = own[rank].mean() > _RATIO * _others(own, rank).mean()
    return bool(is_longer and excess.mean() > _ERRORS * error)


def _others(own: npt.NDArray[np.float64], rank: int) -> npt.NDArray[np.float64]:
    middle: npt.NDArray[np.float64] = np.median(np.delete(own, rank, axis=0), axis=0)
    return middle


def _slow_lane(lanes: Sequence[Mapping[str, float]], rank: int) -> tuple[str, float, float]:
    def there(lane: str) -> float:
        return float(np.median([item[lane] for r, item in enumerate(lanes) if r != rank]))

    own = {lane: ms for lane, ms in lanes[rank].items() if lane not in _NOT_OWN}
    lane = max(own, key=lambda value: own[value] - there(value))
    return lane, own[lane], there(lane)


def _listed(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
