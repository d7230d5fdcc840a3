"""The lanes of a framework's steps, as its hooks show them: a Timeline, and the unknown lanes."""

from __future__ import annotations

from functools import cache
from statistics import median
from time import perf_counter_ns as clock
from typing import Any

from flatout.console import say
from flatout.measure import STEP_LANES, Live, Timeline
from flatout.words import rounded

_BETWEEN = ("evaluation", "saving")


class StepLanes:
    """Makes a Timeline from marks, each of which names the lane of the time before it.

    Idle time is left out: the Timeline finds it as the gap between two steps.

    Attributes:
        timeline: the steps so far.
        runs: whether marks count; those outside of a fit do not.
        within: while set, all time belongs to this lane, whatever the marks say.
        lanes: lanes that any mark has named.
        looks: number of other checks; each is counted with the cost of a mark.
    """

    def __init__(self) -> None:
        # Marks are counted here, so the Timeline counts no clock reads.
        self.timeline = Timeline(clock_reads=0)
        self.runs = False
        self.within: str | None = None
        self.lanes: set[str] = set()
        self.looks = 0
        self._live: Live | None = None
        self._marks = 0
        self._begin()

    def _begin(self) -> None:
        self._spent = dict.fromkeys(STEP_LANES, 0)
        self._since = clock()

    def start(self) -> None:
        rank, world_size = _rank_and_size()
        self.within = None
        self.runs = True
        self.timeline.start()
        self._live = Live(self.timeline, rank=rank, world_size=world_size)
        self._begin()

    def stop(self) -> None:
        self.runs = False
        self.timeline.stop()
        if self._live is not None:
            self._live.close()
            self._live = None

    def was(self, lane: str) -> None:
        if not self.runs:
            return
        now = clock()
        lane = self.within or lane
        if lane in self._spent:
            self._spent[lane] += now - self._since
        elif lane in _BETWEEN:
            self.timeline.add(lane, now - self._since)
        self._since = now
        self._marks += 1
        self.lanes.add(lane)

    def end_step(self) -> None:
        # Time between a step's parts, such as an evaluation between two accumulated batches, counts
        # as before the step.
        self.timeline.record(self._since - sum(self._spent.values()), *self._spent.values())
        self._spent = dict.fromkeys(STEP_LANES, 0)
        if self._live is not None and self._since >= self._live.due:
            self._live.write()

    @property
    def added_us_per_step(self) -> float:
        marks = (self._marks + self.looks) / max(1, self.timeline.steps)
        return self.timeline.added_us_per_step + marks * _cost_of_a_mark_us()

    def as_dict(self, hidden: dict[str, str]) -> dict[str, Any]:
        data = self.timeline.as_dict()
        data["lanes_ms"] |= dict.fromkeys(hidden)
        data["hidden_in"] = hidden
        data["added_us_per_step"] = self.added_us_per_step
        return data

    def say(self, hidden: dict[str, str]) -> None:
        say(*describe(self.timeline, hidden))


class Watches:
    """Common methods of the callbacks for all frameworks.

    A subclass has a StepLanes in `_step_lanes`, and names the lanes that it cannot measure.
    """

    _step_lanes: StepLanes

    @property
    def timeline(self) -> Timeline:
        return self._step_lanes.timeline

    def as_dict(self) -> dict[str, Any]:
        return self._step_lanes.as_dict(self._hidden())

    def _hidden(self) -> dict[str, str]:
        raise NotImplementedError


def describe(timeline: Timeline, hidden: dict[str, str]) -> list[str]:
    if not timeline.steps:
        return ["no step was seen"]
    lanes = timeline.lanes()
    whole = sum(lanes.values())
    lanes_shown = {lane: ms for lane, ms in lanes.items() if ms >= 0.02 * whole}
    parts = [f"{lane} {rounded(ms)}" for lane, ms in lanes_shown.items()]
    other = whole - sum(lanes_shown.values())
    if other > 0.0005 * whole:
        parts.append(f"other {rounded(other)}")
    critical = max(lanes, key=lanes.__getitem__)
    share = f"{lanes[critical] / whole:.0%} of {timeline.steps:,} steps"
    unknown = ", ".join(f"{lane} (within {holder})" for lane, holder in hidden.items())
    return [
        f"step {rounded(whole)} ms: {', '.join(parts)}",
        f"critical lane: {critical}, {share}{'; not seen: ' if unknown else ''}{unknown}",
    ]


def hidden_sync(lane: str = "backward") -> dict[str, str]:
    return {"sync": lane} if _rank_and_size()[1] > 1 else {}


def _rank_and_size() -> tuple[int, int]:
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


@cache
def _cost_of_a_mark_us() -> float:
    count, rounds = 1000, []
    for _ in range(5):
        lanes = StepLanes()
        lanes.runs = True
        began = clock()
        for _ in range(count):
            lanes.was("forward")
        rounds.append((clock() - began) / count / 1e3)
    return median(rounds)
