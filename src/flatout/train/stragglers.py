"""Which rank the others wait for, and what makes it slow.

A rank's own time is what it needs without waiting in collectives, whatever it does meanwhile: where
all wait for one another in each step, step times are equal and say nothing.
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

# Named is a rank that needs so much longer than the others at the median, and whose excess is that
# many standard errors.
_RATIO, _ERRORS = 1.2, 4.0
# Own times are means over stretches of steps: at least and at most so many.
_FEWEST, _MOST = 8, 64
# Lanes that do not make a rank's own step slow, and words for those whose names say too little.
_NOT_OWN = ("sync", "evaluation")
_GOES_ON = "their steps do not wait for it"
_WORDS = {
    "gc": "garbage collection",
    "host": "reading and logging",
    "idle": "what runs between steps, such as callbacks,",
}


class Pace(Part):
    """Marks after steps, from which a rank's own time per step is known."""

    def __init__(self, log: CollectiveLog) -> None:
        self._log = log
        self.reset()

    def reset(self) -> None:
        """Begin again."""
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
        """This rank's own time per step in ms, in each stretch between two marks."""
        spans = np.diff(np.array(self._marks, dtype=np.int64).reshape(-1, 2), axis=0)
        own: list[float] = ((spans[:, 0] - spans[:, 1]) / self._every / 1e6).tolist()
        return own


class Times(NamedTuple):
    """What one rank tells the others at the end of an epoch.

    Attributes:
        host: of the rank.
        lanes: ms per step by lane, of this epoch.
        own_ms: own time per step in each stretch of the epoch.
        notes: what the user should know.
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
        """Tell the others this rank's times and notes; all ranks call it."""
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
    """Ranks that the others wait for.

    Attributes:
        ranks: the slowest first.
        lane: in which the slowest needs most beyond the others.
        words: for people.
    """

    ranks: tuple[int, ...]
    lane: str
    words: str


def straggler(times: Sequence[Times], waits: bool = True) -> Straggler | None:
    """The ranks that are clearly slower than the others, if there are any."""
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
