"""Random choices of `augment`, and their effects on pixels."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from flatout.data.augmentation.resized_crop import ResizedCrop, Size, is_count
from flatout.data.randomness import Draws
from flatout.data.reading.block import Numbers
from flatout.data.reading.buffers import Buffers
from flatout.errors import DataError
from flatout.kernels import ONE, change_images

Flip = Literal["horizontal", "vertical", "both"]
# Shape (rows, height, width, channels).
Pixels: TypeAlias = npt.NDArray[Any]

# Codes of the orientations that each flip chooses from: 4 means mirrored left to right; add 0 to 3
# for quarter turns to the left. With quarter turns, any flip gives the same eight orientations.
_ORIENTATIONS = {None: (0,), "horizontal": (0, 4), "vertical": (0, 6), "both": (0, 4, 6, 2)}
_TURNS, _ALL = (0, 1, 2, 3), tuple(range(8))
# Number of parts that `five_crop` chooses from.
_CORNERS = 5
_CROPS = ("crop", "five_crop", "random_resized_crop")
# Index, in a sample's sequence of random numbers, of the number that decides each choice.
_ORIENTATION, _CORNER, _TOP, _LEFT, _COLORS = range(5)
_CUT_TOP, _CUT_LEFT = 7, 8  # after three numbers for colors


@dataclass(frozen=True)
class Augmentation:
    """Random choices for each image, applied in the order of the attributes.

    Attributes:
        crop: height and width of a part of the image, at a random position.
        padding: width of the black border that is added before `crop`.
        five_crop: height and width of the part, which is one of four corners or the middle.
        random_resized_crop: part of random area, shape and position, resized to one size.
        flip: direction in which half of the images are mirrored; "both" draws each direction
            independently.
        rotate: 90 rotates by 0, 1, 2 or 3 quarter turns; None does not rotate.
        brightness: the factor is drawn from 1 - brightness (at least 0) to 1 + brightness; 0: no
            change.
        contrast: the factor is drawn from 1 - contrast (at least 0) to 1 + contrast; 0: no change.
        saturation: the factor is drawn from 1 - saturation (at least 0) to 1 + saturation; 0: no
            change.
        cutout: height and width, in pixels, of a square of zeros at a random position. The square
            may be partly outside the image.
        views: number of different results that a sample can have; None: no limit.
    """

    crop: Size | None = None
    padding: int = 0
    five_crop: Size | None = None
    random_resized_crop: ResizedCrop | None = None
    flip: Flip | None = None
    rotate: int | None = None
    brightness: float = 0.0
    contrast: float = 0.0
    saturation: float = 0.0
    cutout: int | None = None
    views: int | None = None

    def __post_init__(self) -> None:
        if self.flip not in (None, *get_args(Flip)):
            raise DataError(
                f"augment: expected flip as 'horizontal', 'vertical' or 'both', found {self.flip!r}"
            )
        if self.rotate not in (None, 90):
            raise DataError(
                f"augment: expected rotate=90, for quarter turns, found {self.rotate!r}",
                do="for other angles use map with a function that takes rng",
            )
        if self.views is not None and not is_count(self.views):
            raise DataError(f"augment: expected views as an int from 1, found {self.views!r}")
        if not is_count(self.padding, least=0):
            raise DataError(f"augment: expected padding in pixels from 0, found {self.padding!r}")
        if self.padding and self.crop is None:
            raise DataError("augment: padding is for crop=, which is missing", do="pass crop=SIZE")
        if self.cutout is not None and not is_count(self.cutout):
            raise DataError(f"augment: expected cutout in pixels from 1, found {self.cutout!r}")
        crops = [name for name in _CROPS if getattr(self, name) is not None]
        if len(crops) > 1:
            raise DataError(
                f"augment: {' and '.join(crops)} exclude each other",
                do="leave one out, or write two augment stages",
            )
        for name in ("brightness", "contrast", "saturation"):
            value = getattr(self, name)
            if (
                isinstance(value, bool)
                or not isinstance(value, (int, float))
                or not 0 <= value <= 9
            ):
                raise DataError(
                    f"augment: expected {name} as a number from 0 to 9, found {value!r}"
                )
        if not any((*crops, self.flip, self.rotate, self.cutout, *self._colors)):
            raise DataError("augment: nothing to do", do="pass a choice, such as flip='horizontal'")

    def __str__(self) -> str:
        """Return the arguments as the user wrote them, such as "flip='horizontal', rotate=90"."""
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        options = {name: value for name, value in given.items() if value not in (None, 0)}
        return ", ".join(f"{name}={value!r}" for name, value in options.items())

    @property
    def variants(self) -> int | None:
        """Number of different results that an image can have; None if there is no limit."""
        if self.views is not None:
            return self.views
        if self.crop or self.random_resized_crop or self.cutout or any(self._colors):
            return None
        return len(self._orientations) * (1 if self.five_crop is None else _CORNERS)

    def variant(self, draws: Draws) -> Numbers:
        """Return the index, below `variants`, of each image's result: int64 of shape (rows,)."""
        orientation = draws.below(len(self._orientations), _ORIENTATION)
        if self.five_crop is None:
            return orientation
        return orientation * _CORNERS + draws.below(_CORNERS, _CORNER)

    @property
    def _orientations(self) -> tuple[int, ...]:
        if self.rotate is None:
            return _ORIENTATIONS[self.flip]
        return _TURNS if self.flip is None else _ALL

    def check(self, height: int, width: int, channels: int, dtype: npt.DTypeLike) -> None:
        if any(self._colors) and (dtype != np.uint8 or channels not in (1, 3)):
            raise DataError(
                "augment: brightness, contrast and saturation want uint8 images of 1 or 3 "
                f"channels, found {dtype} with {channels}",
                do="hand over the images as bytes, and write .normalize() after augment",
            )
        if self.saturation and channels != 3:
            raise DataError(
                "augment: saturation wants images of 3 channels, and gray ones have none",
                do="leave saturation out, or read colors: images(..., channels=3)",
            )
        wanted = self.crop or self.five_crop
        if wanted is not None:
            around = 2 * self.padding
            if wanted[0] > height + around or wanted[1] > width + around:
                name = "five_crop" if self.crop is None else "crop"
                raise DataError(
                    f"augment: {name} of {wanted[0]} x {wanted[1]} is larger than the images of "
                    f"{height} x {width}" + (f" with {around} of padding" if around else ""),
                    do="crop less, or read larger images: images(..., size=)",
                )
            height, width = wanted
        if self.random_resized_crop is not None:
            self.random_resized_crop.check(dtype)
            height, width = self.random_resized_crop.size
        if self.cutout is not None and self.cutout > min(height, width):
            raise DataError(
                f"augment: cutout={self.cutout} is larger than the images of {height} x {width}",
                do="cut out less; half of the side is usual",
            )
        if self.rotate is not None and height != width:
            raise DataError(
                f"augment: rotate=90 wants square images, found {height} x {width}",
                do="crop to a square: crop=SIZE, or read them with images(..., size=)",
            )

    def __call__(
        self, pixels: Pixels, draws: Draws, buffers: Buffers, index: Numbers | None = None
    ) -> Pixels:
        """Return the changed images in new memory; `draws` decides the changes."""
        _, height, width, channels = pixels.shape
        parts, size = None, self.crop or self.five_crop or (height, width)
        if self.random_resized_crop is not None:
            parts = self.random_resized_crop.places(height, width, draws)
            size = self.random_resized_crop.size
        choices = np.array(self._orientations, np.int64)
        orientation = choices[draws.below(len(choices), _ORIENTATION)]
        made = buffers.empty((draws.rows, *size, channels), pixels.dtype)
        change_images(
            pixels,
            made,
            np.column_stack([self._places(height, width, draws), orientation]),
            index=index,
            parts=parts,
            factors=self._factors(draws) if any(self._colors) else None,
            boxes=None if self.cutout is None else self._boxes(size, self.cutout, draws),
        )
        return made

    def _boxes(self, size: Size, side: int, draws: Draws) -> Numbers:
        tops, lefts = (
            draws.below(length, at) - side // 2
            for length, at in zip(size, (_CUT_TOP, _CUT_LEFT), strict=True)
        )
        return np.column_stack([tops, lefts, tops + side, lefts + side])

    @property
    def _colors(self) -> tuple[float, float, float]:
        return self.brightness, self.contrast, self.saturation

    def _factors(self, draws: Draws) -> Numbers:
        columns = []
        for at, most in enumerate(self._colors):
            low, high = max(0.0, 1 - most), 1 + most
            drawn = low + (high - low) * draws.uniform(_COLORS + at)
            columns.append(np.rint(drawn * ONE).astype(np.int64))
        return np.column_stack(columns)

    def _places(self, height: int, width: int, draws: Draws) -> Numbers:
        if self.crop is not None:
            room = [
                n + 2 * self.padding - w for n, w in zip((height, width), self.crop, strict=True)
            ]
            top, left = draws.below(room[0] + 1, _TOP), draws.below(room[1] + 1, _LEFT)
            return np.stack([top, left], axis=1) - self.padding
        if self.five_crop is not None:
            down, right = height - self.five_crop[0], width - self.five_crop[1]
            middle = (round(down / 2), round(right / 2))
            corners = np.array([(0, 0), (0, right), (down, 0), (down, right), middle], np.int64)
            return corners[draws.below(_CORNERS, _CORNER)]
        return np.zeros((draws.rows, 2), np.int64)
