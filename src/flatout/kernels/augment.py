"""What augmentation does to pixels: parts of images in any orientation, and colors.

The C extension and its numpy fallback give the same bytes.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from flatout.kernels import absent

try:
    from flatout.kernels import _augment as _c
except ImportError:
    _c = None  # type: ignore[assignment]

_use_c = _c is not None and absent.WANTED

Images: TypeAlias = npt.NDArray[Any]
Integers: TypeAlias = npt.NDArray[np.int64]

ONE = 65536
"""A factor that changes nothing."""
_GRAY = np.array([19589, 38470, 7471], np.int64)  # 0.2989, 0.587 and 0.114


def arrange(source: Images, out: Images, places: Integers) -> None:
    """Copy a part of each image into `out`, mirrored and turned.

    Args:
        source: of shape (rows, height, width, channels), C-contiguous, of any dtype.
        out: the same, of any height and width, in other memory: the parts.
        places: int64 of shape (rows, 3): top and left of each part, which may lie outside the
            image, where all is 0; and its orientation: mirrored left to right where 4 is in it,
            then turned by 0 to 3 quarters to the left. Only squares can be turned by a quarter.

    Raises:
        ValueError: an array has another shape or memory layout, or they share memory.
    """
    if _c is None:
        absent.say_once()
    source, out = _as_bytes("source", source), _as_bytes("out", out)
    if _use_c:
        _c.arrange(source, out, places)
        return
    size = out.shape[1:3]
    for row, (top, left, orientation) in enumerate(places.tolist()):
        part = _cut(source[row], top, left, size)
        mirrored = part[:, ::-1] if orientation & 4 else part
        out[row] = np.rot90(mirrored, orientation & 3)


def adjust(pixels: npt.NDArray[np.uint8], factors: Integers) -> None:
    """Change brightness, then contrast, then saturation of images, in place.

    The formulas are torchvision's, in fixed point: values differ from torchvision's by one gray
    level at most, and for a contrast or saturation of s by 1 + |1 - s|.

    Args:
        pixels: uint8 of shape (rows, height, width, 1 or 3), C-contiguous.
        factors: int64 of shape (rows, 3), in 65536ths, from 0 to 100: of brightness, contrast and
            saturation. That of saturation is 1 where images are gray.

    Raises:
        ValueError: an array has another dtype, shape or memory layout, or a factor is out of range.
    """
    if _c is None:
        absent.say_once()
    if _use_c:
        _c.adjust(pixels, factors)
        return
    for row, (brightness, contrast, saturation) in enumerate(factors.tolist()):
        image = pixels[row].astype(np.int64)
        if brightness != ONE:
            image = _cut_off(image * brightness)
        if contrast != ONE:
            count = image.shape[0] * image.shape[1]
            mean = (int(_gray(image).sum()) * ONE + count // 2) // count
            image = _cut_off(image * contrast + (((ONE - contrast) * mean) >> 16))
        if saturation != ONE:
            image = _cut_off(image * saturation + _gray(image) * (ONE - saturation))
        pixels[row] = image


def _as_bytes(name: str, images: Images) -> npt.NDArray[np.uint8]:
    """With the bytes of a pixel as the last dimension."""
    if images.ndim != 4 or not images.flags.c_contiguous or not images.size:
        raise ValueError(
            f"{name}: expected C-contiguous images of shape (rows, height, width, channels), found "
            f"shape {images.shape} and strides {images.strides}"
        )
    return images.view(np.uint8)


def _cut(image: Images, top: int, left: int, size: tuple[int, ...]) -> Images:
    """A part of an image, 0 where it reaches beyond it."""
    height, width = image.shape[:2]
    if top >= 0 and left >= 0 and top + size[0] <= height and left + size[1] <= width:
        return image[top : top + size[0], left : left + size[1]]
    part = np.zeros((*size, image.shape[2]), image.dtype)
    rows = np.arange(max(0, top), min(height, top + size[0]))
    columns = np.arange(max(0, left), min(width, left + size[1]))
    if len(rows) and len(columns):
        part[np.ix_(rows - top, columns - left)] = image[np.ix_(rows, columns)]
    return part


def _gray(image: Integers) -> Integers:
    return image if image.shape[2] == 1 else ((image @ _GRAY) >> 16)[..., np.newaxis]


def _cut_off(values: Integers) -> Integers:
    return (values >> 16).clip(0, 255)
