"""Steps of unlike batches compared: sequences may be longer in one batch than in another.

A batch of so many values takes about as long as others of its kind did: seconds by values are
learned from the steps of one of the settings, in classes of half an octave, and interpolated
between their medians. Steps are told as what they would take if they were of the typical mix of
batches, so that settings are compared within like batches, and long ones weigh as much as they do
in the run.
"""

from __future__ import annotations

import math
from collections import deque
from statistics import fmean, median

import numpy as np

from flatout.train.settings import Settings

Step = tuple[int, float]
"""The values that the inputs of its batches have, and its seconds."""

# Classes of batches in each doubling of their values.
_CLASSES = 2
# Steps that are remembered of each class, and first steps that tell the typical mix.
_LATEST, _TYPICAL = 32, 32


class Lengths:
    """What steps took by how many values their batches have.

    Attributes:
        varied: whether batches have different numbers of values.
    """

    def __init__(self) -> None:
        self.varied = False
        self._steps: dict[Settings, dict[int, deque[Step]]] = {}
        self._typical: list[int] = []

    def add(self, settings: Settings, steps: list[Step]) -> None:
        """Steps under some settings."""
        classes = self._steps.setdefault(settings, {})
        for values, seconds in steps:
            classes.setdefault(_class_of(values), deque(maxlen=_LATEST)).append((values, seconds))
            if len(self._typical) < _TYPICAL:
                self._typical.append(values)
            self.varied = self.varied or values != self._typical[0]

    def typical_s(self, steps: list[Step]) -> float:
        """Seconds per step, as if they were of the typical mix of batches."""
        took = sum(seconds for _, seconds in steps)
        usual = sum(self._usual_s([values for values, _ in steps]))
        return took / usual * fmean(self._usual_s(self._typical))

    def _usual_s(self, values: list[int]) -> list[float]:
        """What steps of so many values take under the settings that ran first."""
        logs = np.log(np.maximum(values, 1))
        classes = next(iter(self._steps.values()))
        middles = sorted(
            (
                median(math.log(max(v, 1)) for v, _ in of),
                median(math.log(max(s, 1e-9)) for _, s in of),
            )
            for of in classes.values()
        )
        known, seconds = np.array(middles).T
        # Beyond what was seen, a step takes as much longer as it has more values.
        beyond = logs - np.clip(logs, known[0], known[-1])
        usual: list[float] = np.exp(np.interp(logs, known, seconds) + beyond).tolist()
        return usual


def _class_of(values: int) -> int:
    return round(_CLASSES * math.log2(max(values, 1)))
