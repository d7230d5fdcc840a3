"""split: make two pipelines over different samples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt

from flatout.data.execution.labels import labels_of
from flatout.data.randomness import order
from flatout.data.reading.block import Numbers
from flatout.data.stages.stage import P, Plan, Stage, Writable
from flatout.errors import DataError


@dataclass(frozen=True)
class Split(Stage):
    fraction: float
    first: bool
    by: Literal["random", "order"]
    seed: int
    stratify: bool

    by_number: ClassVar[bool] = True
    chooses = True

    def choose(self, plan: Plan) -> None:
        labels = None
        if self.stratify:
            plan.numbers, labels = labels_of(plan.samples, plan.numbers, "split(stratify=True)")
        plan.numbers = self.part(plan.numbers, labels)

    def part(self, numbers: Numbers, labels: npt.NDArray[Any] | None) -> Numbers:
        """Return one of the two parts of rows, in ascending order."""
        if self.by == "order":
            cut = self._share(len(numbers))
            return numbers[:cut] if self.first else numbers[cut:]
        if labels is None:
            groups = [np.arange(len(numbers))]
        else:
            groups = [np.flatnonzero(labels == label) for label in np.unique(labels)]
        chosen = np.zeros(len(numbers), bool)
        for at, group in enumerate(groups):
            drawn = group[order(len(group), self.seed, at)]
            chosen[drawn[: self._share(len(group))]] = True
        part = numbers[chosen if self.first else ~chosen]
        if not len(part):
            raise DataError(
                f"split({self.fraction}) leaves {'the first' if self.first else 'the second'} part "
                f"empty: there are {len(numbers):,} samples"
            )
        return part

    def _share(self, count: int) -> int:
        # Rounded to twelve digits first, since 0.9 * 10 may otherwise be less than 9.
        return int(np.floor(round(count * self.fraction, 12)))


def split(
    self: Writable[P],
    fraction: float,
    *,
    by: Literal["random", "order"] = "random",
    seed: int = 0,
    stratify: bool = False,
) -> tuple[P, P]:
    """Make two pipelines over different samples, with the same stages."""
    if not isinstance(fraction, (int, float)) or not 0 < fraction < 1:
        raise DataError(f"split: expected a fraction between 0 and 1, found {fraction!r}")
    if by not in ("random", "order"):
        raise DataError(f"split: by is 'random' or 'order', found {by!r}")
    if stratify and by == "order":
        raise DataError("split: stratify shares out at random, so it cannot go by order")
    first, second = (self._with(Split(fraction, own, by, seed, stratify)) for own in (True, False))
    return first, second
