"""User's lines from stack samples: the time of each per step, and whether that time increases.

The time of libraries is attributed to the user's line that called them. The line names the module
or function of the library that took most of that time.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import TypeVar

from flatout.measure import LANES, grows_steadily
from flatout.observe.observation import Growth, Line, Site
from flatout.observe.sites import read
from flatout.observe.stacks import NOWHERE, Place, Places, Stack

# _LINES: maximum number of lines that are reported; _CALLERS: maximum number of callers reported
# for each line.
_LINES, _CALLERS = 40, 3
# Minimum number of stack samples of a line to estimate its growth.
_FEWEST = 40
# _GROWS_BY: smallest growth over the observation that is reported, as a share of the mean time;
# _FEWEST_BINS: minimum number of bins into which the steps are divided.
_GROWS_BY, _FEWEST_BINS = 0.25, 6
# Multiple of the 95% interval that a growth must exceed, since many lines are tested.
_SURE = 2.0
_HOST, _SYNC = LANES.index("host"), LANES.index("sync")

_Key = TypeVar("_Key")


@dataclass
class _Of:
    """Samples of one line."""

    samples: int = 0
    lanes: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    calls: dict[Place, float] = field(default_factory=lambda: defaultdict(float))
    within: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    callers: dict[Places, float] = field(default_factory=lambda: defaultdict(float))
    bins: list[float] = field(default_factory=list)

    @property
    def ms(self) -> float:
        return sum(self.lanes.values())

    def add(self, stack: Stack, ms_per_ns: dict[str, float]) -> None:
        self.samples += stack.samples
        ns = sum(stack.ns)
        for lane, part in zip(LANES, stack.ns, strict=False):
            if part:
                self.lanes[lane] += part * ms_per_ns[lane]
        self.calls[stack.line] += ns
        self.within[stack.within] += ns
        self.callers[stack.users[1 : _CALLERS + 1]] += ns
        self.bins = [a + b for a, b in zip(self.bins or [0.0] * 99, stack.bins, strict=False)]


def _most(of: dict[_Key, float]) -> _Key:
    return max(of, key=of.__getitem__)


def _with_sync_in_host(stack: Stack) -> Stack:
    ns = list(stack.ns)
    ns[_HOST] += ns[_SYNC]
    ns[_SYNC] = 0.0
    return replace(stack, ns=ns)


class Lines:
    """User's lines with their times.

    Attributes:
        explained: share of the steps' time that is attributed to a user's line, or to a trainer's
            function.
        samples: number of stack samples.
    """

    def __init__(
        self,
        stacks: Iterable[Stack],
        lanes_ms: dict[str, float | None],
        steps: int,
        steps_per_bin: int,
    ) -> None:
        self._steps, self._width = steps, steps_per_bin
        stacks = list(stacks)
        if lanes_ms.get("sync") is None:
            stacks = [_with_sync_in_host(stack) for stack in stacks]
        self.samples = sum(stack.samples for stack in stacks)
        whole = [sum(column) for column in zip(*(stack.ns for stack in stacks), strict=True)]
        ms = {lane: lanes_ms.get(lane) or 0.0 for lane in LANES}
        self._ms_per_ns = {
            lane: ms[lane] / ns if ns else 0.0 for lane, ns in zip(LANES, whole, strict=False)
        }
        self._of: dict[tuple[str, int, str, str], _Of] = defaultdict(_Of)
        for stack in stacks:
            if stack.line is not NOWHERE:
                within = stack.within if stack.trainer else ""
                key = (*stack.line.site, stack.trainer, within)
                self._of[key].add(stack, self._ms_per_ns)
        total_ms = sum(of.ms for of in self._of.values())
        self.explained = min(1.0, total_ms / max(sum(ms.values()), 1e-9))

    def most(self) -> list[Line]:
        """Return the lines that take the most time, in order of decreasing time."""
        lines = sorted(self._of.items(), key=lambda item: -item[1].ms)[:_LINES]
        return [self._line(*key, of) for key, of in lines]

    def _line(self, file: str, line: int, trainer: str, within: str, of: _Of) -> Line:
        callers = _most(of.callers)
        named = _most(of.within)
        # A module is reported only if it took at least half of the line's time.
        if not within and of.within[named] >= 0.5 * sum(of.within.values()):
            within = named
        return Line(
            read(Site(file, line)),
            of.ms,
            {lane: ms for lane, ms in of.lanes.items() if ms},
            _most(of.calls).words(),
            [read(Site(*caller)) for caller in callers],
            within,
            trainer,
            of.samples,
            self._growth(of),
        )

    def _growth(self, of: _Of) -> Growth | None:
        bins = self._steps // self._width
        of_bins = of.bins[1:bins]  # the first bin has one-time work, the last is not full
        if len(of_bins) < _FEWEST_BINS or of.samples < _FEWEST:
            return None
        per_ns = of.ms * self._steps / max(sum(of.bins), 1e-9) / self._width
        return growth([per_ns * ns for ns in of_bins], self._width, of.samples)


def growth(ms: list[float], width: int, samples: int) -> Growth | None:
    """Return the slope of a line's time by step, if it is surely above zero and large enough."""
    # Imported here, since it needs numpy, which the script may have to import first.
    from flatout.measure import student_t

    count, mean = len(ms), sum(ms) / len(ms)
    places = [width * (at - (count - 1) / 2) for at in range(count)]
    spread = sum(place * place for place in places)
    slope = sum(place * item for place, item in zip(places, ms, strict=True)) / spread
    left = [item - mean - slope * place for place, item in zip(places, ms, strict=True)]
    # At least the noise of the sampling itself.
    of_samples = mean * mean * count / samples
    noise = max(sum(item * item for item in left) / (count - 2), of_samples)
    within = student_t(count - 2) * math.sqrt(noise / spread)
    if mean <= 0 or slope <= _SURE * within or slope * width * count < _GROWS_BY * mean:
        return None
    # Samples at regular times vary about half as much as samples at random times.
    if not grows_steadily(places, ms, of_samples / 4):
        return None  # a sudden increase, such as after a part of a model is unfrozen
    return Growth(1e3 * slope, 1e3 * (slope - within), 1e3 * (slope + within))
