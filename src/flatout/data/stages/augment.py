"""augment: images changed at random, in every epoch otherwise."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from flatout.data.augmentation import Augmentation, Flip
from flatout.data.block import Block
from flatout.data.buffers import Buffers
from flatout.data.execution.augmented import Augmented
from flatout.data.execution.samples import Costs
from flatout.data.resized_crop import ResizedCrop, size_of
from flatout.data.stages.batch import Batch
from flatout.data.stages.filter import Filter
from flatout.data.stages.stage import P, Plan, Stage, Writable, only
from flatout.errors import DataError


@dataclass(frozen=True)
class Augment(Stage):
    """Images are changed at random."""

    augmentation: Augmentation

    def __str__(self) -> str:
        """As it was written."""
        return f"augment({self.augmentation})"

    def resume_words(self) -> str:
        """As it was written."""
        return str(self)

    def check(self, before: Sequence[Stage], behind: Sequence[Stage]) -> None:
        """Refuse to come after `batch`, or before what chooses samples by what is drawn."""
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
        """Refuse: files would hold one draw for all epochs."""
        raise DataError(
            "convert would write one draw of augment, for all epochs",
            do="leave it out, and write it after what reads the new files",
        )

    def make(self, plan: Plan) -> None:
        """It stays where it was written."""
        augmented = self._augmented(plan)
        probe = np.array([augmented.probe], np.int64)
        augmented.make(probe, Buffers(), 0, Costs())  # an error comes here, not in the first step
        if (views := self.augmentation.views) is not None:
            plan.moved.append(
                f"augment(views={views}) changes learning: each sample has {views} draws for all "
                "epochs, in place of a new one in each"
            )

    def choose(self, plan: Plan) -> None:
        """Functions behind it see what it makes."""
        self._augmented(plan)

    def stream(self, plan: Plan) -> None:
        """Block by block, as they come."""
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
    """Images changed at random: for each sample and epoch otherwise.

    All draws of a sample are a function of (seed, epoch, sample) alone, and of which time it comes
    in the epoch, so they are the same with any number of threads and ranks. The seed is that of
    `shuffle`. Choices are made in the order of the arguments; for another order write several
    stages. Inputs are images of bytes or floats; targets stay as they are.

    Args:
        crop: height and width, or one number for both, of a part at a random place.
        padding: black pixels around the image, before `crop`.
        five_crop: the same, of one of the four corners or the middle.
        random_resized_crop: height and width, or one number for both, that a part of random area,
            shape and place is brought to, by torchvision's rule; or a dict of `size`, `scale`, the
            least and greatest area (0.08, 1), and `ratio`, the least and greatest width over
            height (3/4, 4/3). Images are of uint8 or float32.
        flip: mirror half of the images: "horizontal", left to right; "vertical", upside down; or
            "both", each independently.
        rotate: 90 turns images, which are square, by 0, 1, 2 or 3 quarters.
        brightness: multiplies by a factor from 1 - brightness, at least 0, to 1 + brightness. Of
            this and the next two torchvision's formulas are used, on uint8 images.
        contrast: the same factor for the distance from the mean gray.
        saturation: the same factor for the distance from each pixel's gray.
        cutout: side in pixels of a square of zeros around a random pixel.
        views: so many draws for each sample, one of which is taken in each epoch, in place of a new
            one: what is computed of a sample can then be kept. Draws for images in a folder depend
            on their names, so they stay when others come or go. This changes learning.

    Raises:
        DataError: the arguments make no sense, or, before the first step, the inputs are no images,
            a crop or cutout is larger than they are, or images to be turned are not square.
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
