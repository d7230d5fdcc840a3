"""Comparison of steps on batches of different sizes, such as sequences of different lengths.

A batch takes about as much time as other batches with a similar number of values. Seconds by number
of values are estimated from the steps under one of the settings. Step times are grouped in classes,
two for each doubling of the number of values, and interpolated between the classes' medians. A
step's time is then converted to the typical mix of batches. Settings are thus compared on similar
batches, and long batches have the same weight as in the run.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from dataclasses import asdict, dataclass
from statistics import fmean, median
from typing import Any

import numpy as np

from flatout.recipe import phrase
from flatout.train.settings import LIVE, Settings

TimedStep = tuple[int, float]
"""Number of values in the inputs of a step's batches, and seconds of the step."""

# Number of classes for each doubling of a batch's values.
_CLASSES = 2
# _LATEST: number of latest steps that are kept in each class. _TYPICAL: number of first steps that
# define the typical mix of batches.
_LATEST, _TYPICAL = 32, 32
# _FEWEST: minimum number of steps in a class before the class may get other settings. _WORTH:
# minimum saving by other settings for some lengths, as a fraction of the time of all steps.
_FEWEST, _WORTH = 3, 0.01


@dataclass(frozen=True)
class ByLength:
    """Settings by the number of values in a step's batches: `short` up to `most` values."""

    most: int
    short: Settings
    long: Settings

    def at(self, values: int) -> Settings:
        """Return the settings for a step with this number of values."""
        return self.short if values <= self.most else self.long

    def other_than(self, plain: Settings) -> dict[str, Any]:
        """Return the fields that differ from plain, with an entry for short batches."""
        short = _words(self.short, plain)
        return {**self.long.other_than(plain), f"up to {self.most:,} values": short}

    def as_dict(self) -> dict[str, Any]:
        """Return plain data, which `of` reads."""
        return {"most": self.most, "short": asdict(self.short), "long": asdict(self.long)}

    @classmethod
    def of(cls, found: dict[str, Any]) -> ByLength:
        """Read the data that `as_dict` returns."""
        short, long = (Settings(**found[part]) for part in ("short", "long"))
        return cls(int(found["most"]), short, long)

    def words(self, plain: Settings) -> str:
        """Describe the settings for short and for long steps."""
        short, long = (_words(item, plain) for item in (self.short, self.long))
        return f"{short} for steps of up to {self.most:,} values, {long} for larger ones"


class Lengths:
    """Step times by the number of values in a step's batches.

    Attributes:
        varied: whether batches have different numbers of values.
        base: settings whose steps give the seconds by number of values; the first settings to run.
    """

    def __init__(self) -> None:
        self.varied = False
        self.base: Settings | ByLength | None = None
        self._steps: dict[Settings | ByLength, dict[int, deque[TimedStep]]] = {}
        self._seen: Counter[int] = Counter()
        self._typical: list[int] = []

    def add(self, settings: Settings | ByLength, steps: list[TimedStep]) -> None:
        """Record steps under some settings."""
        self.base = self.base or settings
        self._seen.update(_class_of(values) for values, _ in steps)
        classes = self._steps.setdefault(settings, {})
        for values, seconds in steps:
            classes.setdefault(_class_of(values), deque(maxlen=_LATEST)).append((values, seconds))
            if len(self._typical) < _TYPICAL:
                self._typical.append(values)
            self.varied = self.varied or values != self._typical[0]

    def typical_s(self, steps: list[TimedStep]) -> float:
        """Return seconds per step, converted to the typical mix of batches."""
        took = sum(seconds for _, seconds in steps)
        usual = sum(self._usual_s([values for values, _ in steps]))
        return took / usual * fmean(self._usual_s(self._typical))

    def split(self, best: Settings) -> ByLength | None:
        """Return settings by length that seem faster than `best` for all steps; None without any.

        The saving is estimated from each class's median of the steps so far; it is no proof.
        """
        mine = self._medians(best)
        whole = sum(count * mine.get(length, 0.0) for length, count in self._seen.items())
        result, saved_most = None, _WORTH * whole
        for other in self._steps:
            if not isinstance(other, Settings) or any(
                live.switches != "step" and getattr(other, name) != getattr(best, name)
                for name, live in LIVE.items()
            ):
                continue
            theirs = self._medians(other)
            both = sorted(mine.keys() & theirs.keys())
            saved = [self._seen[length] * (mine[length] - theirs[length]) for length in both]
            for at, length in enumerate(both[:-1], 1):
                most = _middle_of(length + 0.5)
                for part, split in (
                    (saved[:at], ByLength(most, other, best)),
                    (saved[at:], ByLength(most, best, other)),
                ):
                    if sum(part) > saved_most:
                        result, saved_most = split, sum(part)
        return result

    def _medians(self, settings: Settings) -> dict[int, float]:
        result = {}
        for length, of in self._steps.get(settings, {}).items():
            if len(of) >= _FEWEST:
                middle, *usual = self._usual_s([_middle_of(length), *(values for values, _ in of)])
                result[length] = middle * median(s / u for (_, s), u in zip(of, usual, strict=True))
        return result

    def _usual_s(self, values: list[int]) -> list[float]:
        logs = np.log(np.maximum(values, 1))
        assert self.base is not None
        classes = self._steps[self.base]
        middles = sorted(
            (
                median(math.log(max(v, 1)) for v, _ in of),
                median(math.log(max(s, 1e-9)) for _, s in of),
            )
            for of in classes.values()
        )
        known, seconds = np.array(middles).T
        # Outside the measured range, a step's time is proportional to its number of values.
        beyond = logs - np.clip(logs, known[0], known[-1])
        usual: list[float] = np.exp(np.interp(logs, known, seconds) + beyond).tolist()
        return usual


def _class_of(values: int) -> int:
    return round(_CLASSES * math.log2(max(values, 1)))


def _middle_of(length: float) -> int:
    return math.floor(2 ** (length / _CLASSES))


def _words(settings: Settings, plain: Settings) -> str:
    return " · ".join(phrase(f, v) for f, v in settings.other_than(plain).items()) or "plain"
