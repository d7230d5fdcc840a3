"""augment: change images at random, in another way in each epoch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from flatout.data.augmentation.augmentation import Augmentation, Flip
from flatout.data.augmentation.resized_crop import ResizedCrop, size_of
from flatout.data.execution.augmented import Augmented
from flatout.data.execution.samples import Costs
from flatout.data.reading.block import Block
from flatout.data.reading.buffers import Buffers
from flatout.data.stages.batch import Batch
from flatout.data.stages.filter import Filter
from flatout.data.stages.stage import P, Plan, Stage, Writable, only
from flatout.errors import DataError


@dataclass(frozen=True)
class Augment(Stage):
    augmentation: Augmentation

    def __str__(self) -> str:
        return f"augment({self.augmentation})"

    def resume_words(self) -> str:
        return str(self)

    def check(self, before: Sequence[Stage], behind: Sequence[Stage]) -> None:
        if only(before, Batch) is not None:
            raise DataError(
                "augment comes after batch, and changes samples", do="put augment before batch"
            )
        if only(behind, Filter) is not None:
            raise DataError(
                "filter comes after augment, where a draw would decide which samples take part",
                do="put filter before augment",
            )

    def check_convert(self) -> None:
        raise DataError(
            "convert would write one draw of augment, for all epochs",
            do="leave it out, and write it after what reads the new files",
        )

    def make(self, plan: Plan) -> None:
        augmented = self._augmented(plan)
        probe = np.array([augmented.probe], np.int64)
        # an error in the settings comes here, not in the first step
        augmented.make(probe, Buffers(), 0, Costs())
        if (views := self.augmentation.views) is not None:
            plan.moved.append(
                f"augment(views={views}) changes learning: each sample has {views} draws for all "
                "epochs, in place of a new one in each"
            )

    def choose(self, plan: Plan) -> None:
        self._augmented(plan)

    def stream(self, plan: Plan) -> None:
        augmented = self._augmented(plan)

        def step(blocks: Iterator[Block], epoch: int) -> Iterator[Block]:
            return (augmented.apply(block, epoch) for block in blocks)

        plan.steps.append(step)

    def _augmented(self, plan: Plan) -> Augmented:
        place = sum(isinstance(stage, Augment) for stage in plan.passed)
        plan.samples = augmented = Augmented(plan.samples, self.augmentation, plan.seed, place)
        plan.runs.append(augmented.name)
        return augmented


def augment(
    self: Writable[P],
    *,
    crop: int | tuple[int, int] | None = None,
    padding: int = 0,
    five_crop: int | tuple[int, int] | None = None,
    random_resized_crop: int | tuple[int, int] | Mapping[str, Any] | None = None,
    flip: Flip | None = None,
    rotate: int | None = None,
    brightness: float = 0.0,
    contrast: float = 0.0,
    saturation: float = 0.0,
    cutout: int | None = None,
    views: int | None = None,
) -> P:
    """Change images at random, in another way for each sample and epoch.

    All draws of a sample depend only on (seed, epoch, sample), and on its turn if it comes several
    times in an epoch. So they are the same with any number of threads and ranks. The seed is that
    of `shuffle`. Choices are applied in the order of the arguments; for another order write several
    stages. Inputs are images of bytes or floats; targets do not change.
    """
    augmentation = Augmentation(
        crop=size_of("crop", crop),
        padding=padding,
        five_crop=size_of("five_crop", five_crop),
        random_resized_crop=ResizedCrop.of(random_resized_crop),
        flip=flip,
        rotate=rotate,
        brightness=brightness,
        contrast=contrast,
        saturation=saturation,
        cutout=cutout,
        views=views,
    )
    return self._with(Augment(augmentation))
