"""A part of an image of random area and shape, resized to one size, by torchvision's rule."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from flatout.data.randomness import Draws
from flatout.data.reading.block import Numbers
from flatout.errors import DataError

Size: TypeAlias = tuple[int, int]
Pair: TypeAlias = tuple[float, float]

# Random parts that are tried for each image before the fallback.
_TRIES = 10
# Indices, in a sample's sequence of random numbers, after those of `Augmentation`.
_TOP, _LEFT, _FIRST = 16, 17, 18


@dataclass(frozen=True, repr=False)
class ResizedCrop:
    """Parts of images with random area, shape and position.

    Attributes:
        size: height and width to which all parts are resized.
        scale: minimum and maximum area of a part, as a fraction of the image's area.
        ratio: minimum and maximum ratio of a part's width to its height; its logarithm is uniform.
    """

    size: Size
    scale: Pair = (0.08, 1.0)
    ratio: Pair = (3 / 4, 4 / 3)

    def __post_init__(self) -> None:
        for name, most in (("scale", 1.0), ("ratio", math.inf)):
            pair = getattr(self, name)
            if not _is_range(pair, most):
                raise DataError(
                    f"augment: expected {name} of random_resized_crop as two ascending numbers "
                    f"above 0{' up to 1' if most == 1 else ''}, found {pair!r}"
                )

    def __repr__(self) -> str:
        return f"dict(size={self.size}, scale={self.scale}, ratio={self.ratio})"

    @classmethod
    def of(cls, given: Any) -> ResizedCrop | None:
        """Make it from a size, or from a dict with size, scale and ratio; None for None."""
        if given is None:
            return None
        words = dict(given) if isinstance(given, Mapping) else {"size": given}
        if other := [name for name in words if name not in cls.__dataclass_fields__]:
            raise DataError(
                "augment: expected size, scale and ratio in random_resized_crop, found "
                f"{other[0]!r}"
            )
        size = size_of("random_resized_crop", words.pop("size", None))
        if size is None:
            raise DataError("augment: random_resized_crop lacks a size", do="pass dict(size=...)")
        return cls(size, **{k: tuple(v) if isinstance(v, list) else v for k, v in words.items()})

    def check(self, dtype: npt.DTypeLike) -> None:
        if dtype not in (np.uint8, np.float32, np.float64):
            raise DataError(
                f"augment: random_resized_crop wants uint8 or float32 images, found {dtype}",
                do="hand over the images as bytes",
            )

    def places(self, height: int, width: int, draws: Draws) -> Numbers:
        """Return top, left, height and width of each part: int64 of shape (rows, 4)."""
        high, wide = self._fallback(height, width)
        sizes = np.tile(np.array([high, wide], np.int64), (draws.rows, 1))
        fits = np.zeros(draws.rows, bool)
        low, most = np.log(self.ratio)
        for at in range(_FIRST, _FIRST + 2 * _TRIES, 2):
            area = height * width * _between(*self.scale, draws.uniform(at))
            ratio = np.exp(_between(low, most, draws.uniform(at + 1)))
            tried = np.rint(np.sqrt([area / ratio, area * ratio])).astype(np.int64).T
            good = ((tried > 0) & (tried <= (height, width))).all(axis=1) & ~fits
            sizes[good] = tried[good]
            fits |= good
            if fits.all():
                break
        room = np.array([height, width]) - sizes
        drawn = np.stack([draws.below(room[:, 0] + 1, _TOP), draws.below(room[:, 1] + 1, _LEFT)], 1)
        return np.hstack([np.where(fits[:, None], drawn, room // 2), sizes])

    def _fallback(self, height: int, width: int) -> Size:
        least, most = self.ratio
        if width < least * height:
            return max(1, round(width / least)), width
        if width > most * height:
            return height, max(1, round(height * most))
        return height, width


def _between(low: float, high: float, drawn: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    return low + (high - low) * drawn


def _is_range(pair: Any, most: float) -> bool:
    return (
        isinstance(pair, tuple)
        and len(pair) == 2
        and all(isinstance(n, (int, float)) and not isinstance(n, bool) for n in pair)
        and 0 < pair[0] <= pair[1] <= most
        and math.isfinite(pair[1])
    )


def size_of(name: str, given: Any) -> Size | None:
    """Return height and width from a pair of them, or from one number for both."""
    pair = given if isinstance(given, (tuple, list)) else (given, given)
    if given is not None and not (len(pair) == 2 and all(map(is_count, pair))):
        raise DataError(
            f"augment: expected {name} as an int from 1, or as height and width, found {given!r}"
        )
    return None if given is None else (pair[0], pair[1])


def is_count(value: Any, least: int = 1) -> bool:
    """Return whether a value is an int from `least`."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
