"""Augmented images: parts of any size and orientation, changed colors, black boxes."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from flatout.kernels import missing_extension

_c = missing_extension.required("_augment")

Images: TypeAlias = npt.NDArray[Any]
Integers: TypeAlias = npt.NDArray[np.int64]

ONE = 65536
"""A factor that changes nothing."""
# Bytes of the widest vectors that are used, if the processor has them.
_VECTORS = 32


def change_images(
    source: Images,
    out: Images,
    places: Integers,
    *,
    index: Integers | None = None,
    parts: Integers | None = None,
    factors: Integers | None = None,
    boxes: Integers | None = None,
) -> None:
    """Copy parts of images into `out`, mirrored and turned, with changed colors and a black box.

    Parts are resized by a triangle filter that averages over all pixels when it shrinks them. The
    result equals torch's `interpolate(mode="bilinear", antialias=True)` for uint8 images, byte for
    byte. The formulas of colors are torchvision's, in fixed point: values differ from torchvision's
    by at most one gray level, and for a contrast or saturation of s by at most 1 + |1 - s|.

    Args:
        source: of shape (images, height, width, channels), of any dtype; uint8 with factors, and
            uint8 or floats with parts. Each image is C-contiguous; there may be gaps between
            images.
        out: C-contiguous, of shape (rows, height, width, channels), in other memory.
        places: int64 of shape (rows, 3): top and left of the copied part, which may be outside the
            image, where all is 0; and its orientation: mirrored left to right if it contains 4,
            then turned by 0 to 3 quarters to the left. Only squares can be turned by a quarter.
        index: int64 of shape (rows,): the image that each row is made of; None: one after the
            other.
        parts: int64 of shape (rows, 4): top, left, height and width of the part that is resized to
            the size of `out`, before it is mirrored and turned. Then top and left of `places` do
            not count.
        factors: int64 of shape (rows, 3), in 65536ths, from 0 to 100: of brightness, contrast and
            saturation, in this order. The factor of saturation is 1 for gray images.
        boxes: int64 of shape (rows, 4): top, left, bottom and right of the box that is set to 0 at
            the end; parts outside the image are left out.

    Raises:
        IndexError: an index is out of range.
        ValueError: an array has another dtype, shape or memory layout, they share memory, or a
            number is out of range. Nothing is written.
    """
    if index is None:
        if len(source) != len(out):
            raise ValueError(f"out: expected the source's {len(source)} rows, found {len(out)}")
        index = np.arange(len(out), dtype=np.int64)
    size = (out.shape[1], out.shape[2])
    if parts is not None and source.dtype != np.uint8:
        source = np.stack(
            [_resized(*item, size) for item in zip(source[index], parts, strict=True)]
        )
        index, parts, places = np.arange(len(out)), None, places * np.array([0, 0, 1])
    source, out = _as_bytes("source", source), _as_bytes("out", out)
    index = np.ascontiguousarray(index, np.int64)
    _c.change(source, out, index, places, parts, factors, boxes, _VECTORS)


def _as_bytes(name: str, images: Images) -> npt.NDArray[np.uint8]:
    if images.ndim != 4 or not images.size or not images[0].flags.c_contiguous:
        raise ValueError(
            f"{name}: expected C-contiguous images of shape (rows, height, width, channels), found "
            f"shape {images.shape} and strides {images.strides}"
        )
    return images.view(np.uint8)


def _resized(image: Images, part: Integers, size: tuple[int, int]) -> Images:
    import torch

    top, left, height, width = part.tolist()
    crop = image[top : top + height, left : left + width]
    if crop.shape[:2] == size:
        return crop
    batch = torch.from_numpy(np.ascontiguousarray(crop)).unsqueeze(0).permute(0, 3, 1, 2)
    made = torch.nn.functional.interpolate(batch, size, mode="bilinear", antialias=True)
    return made[0].permute(1, 2, 0).numpy()
