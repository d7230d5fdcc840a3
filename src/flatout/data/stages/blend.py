"""mixup and cutmix: blend samples of a batch with each other."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from flatout.data.augmentation.blend import Blend, Kind
from flatout.data.execution.batch_sampler import whole_number
from flatout.data.execution.samples import Costs, sample_rng
from flatout.data.ids.classes import classes_of
from flatout.data.reading.buffers import Buffers
from flatout.data.stages.batch import Batch
from flatout.data.stages.map import Map
from flatout.data.stages.stage import P, Plan, Stage, Writable, only
from flatout.errors import DataError


@dataclass(frozen=True)
class Blended(Stage):
    """Each sample is blended with the sample before it in the global batch.

    Attributes:
        alpha: parameter of the Beta distribution of the blend's weight.
        classes: number of classes; None if the data or the targets state it.
    """

    alpha: float
    classes: int | None = None

    once: ClassVar[bool] = True
    kind: ClassVar[Kind]

    def check(self, before: Sequence[Stage], behind: Sequence[Stage]) -> None:
        batch = only(before, Batch)
        if batch is None:
            raise DataError(
                f"{self.name} blends samples of a batch, and batch does not come before it",
                do=f"write .batch(size) before .{self.name}({self.alpha:g})",
            )
        if only(before[before.index(batch) :], Map) is not None:
            raise DataError(
                f"{self.name} comes after a function of whole batches",
                do=f"put map after {self.name}, or before batch",
            )

    def check_convert(self) -> None:
        raise DataError(
            f"convert writes rows, and {self.name} blends those of a batch", do="leave it out"
        )

    def stream(self, plan: Plan) -> None:
        names = classes_of(plan.origin)
        known = self.classes if names is None or self.classes else len(names)
        plan.blends.append(Blend(self.kind, self.alpha, known))

    def make(self, plan: Plan) -> None:
        self.stream(plan)
        probe = np.array([plan.samples.probe], np.int64)
        block = plan.samples.make(probe, Buffers(), 0, Costs())
        if len(block):
            batch = plan.samples.form.batch(block, Buffers())
            plan.blends[-1](batch, sample_rng(0, 0, 0), False)
        plan.notes.append(
            f"{self.name} changes learning: each sample is blended with the one before it in its "
            "batch, and targets are shares of classes"
        )


@dataclass(frozen=True)
class Mixup(Blended):
    kind: ClassVar[Kind] = "mixup"


@dataclass(frozen=True)
class Cutmix(Blended):
    kind: ClassVar[Kind] = "cutmix"


def mixup(self: Writable[P], alpha: float, *, classes: int | None = None) -> P:
    """Replace each sample by its weighted mean with the previous sample of the batch.

    Targets are averaged in the same way. The weight is drawn once for a global batch, from the Beta
    distribution (alpha, alpha). It depends on (seed, epoch, batch), so a batch is the same on any
    number of ranks. Class numbers become float32 class probabilities of shape (samples, classes),
    which cross_entropy and accuracy accept. Bytes stay bytes, rounded. If `cutmix` is used too,
    each batch gets one of the two. It changes learning. Validation data, as another pipeline, do
    not change.
    """
    return self._with(Mixup(*_checked("mixup", alpha, classes)))


def cutmix(self: Writable[P], alpha: float = 1.0, *, classes: int | None = None) -> P:
    """Replace a rectangle of each image by that of the previous image of the batch.

    Targets are averaged by area. The rectangle is drawn once for a global batch, its area from the
    Beta distribution (alpha, alpha). All else is as for `mixup`.
    """
    return self._with(Cutmix(*_checked("cutmix", alpha, classes)))


def _checked(name: str, alpha: float, classes: int | None) -> tuple[float, int | None]:
    is_number = isinstance(alpha, (int, float)) and not isinstance(alpha, bool)
    if not is_number or not 0 < alpha < math.inf:
        raise DataError(f"{name}: expected alpha as a number above 0, found {alpha!r}")
    return alpha, None if classes is None else whole_number(f"{name}: classes", classes, 2)
