"""What augmentation does to images: parts of them in any size and orientation, colors, black boxes.

The C extension and its fallback in numpy and torch give the same bytes.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from flatout.kernels import absent
from flatout.kernels.checks import check_range

try:
    from flatout.kernels._augment import change as _change
except ImportError:
    _change = None  # type: ignore[assignment]

_use_c = _change is not None and absent.WANTED

Images: TypeAlias = npt.NDArray[Any]
Integers: TypeAlias = npt.NDArray[np.int64]

ONE = 65536
"""A factor that changes nothing."""
_GRAY = np.array([19589, 38470, 7471], np.int64)  # 0.2989, 0.587 and 0.114
# Bytes of the widest vectors that are used, where the processor has them.
_VECTORS = 64


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
    """Copy a part of each image into `out`, mirrored and turned, with other colors and a black box.

    Parts are resized by a triangle filter that averages over all pixels where it makes them
    smaller, as torch's `interpolate(mode="bilinear", antialias=True)` does it with uint8 images,
    byte for byte. The formulas of colors are torchvision's, in fixed point: values differ from
    torchvision's by one gray level at most, and for a contrast or saturation of s by 1 + |1 - s|.

    Args:
        source: of shape (images, height, width, channels), of any dtype; uint8 where there are
            factors, and uint8 or floats where there are parts. Each image is C-contiguous;
            something may lie between them.
        out: C-contiguous, of shape (rows, height, width, channels), in other memory.
        places: int64 of shape (rows, 3): top and left of what is copied, which may lie outside the
            image, where all is 0; and its orientation: mirrored left to right where 4 is in it,
            then turned by 0 to 3 quarters to the left. Only squares can be turned by a quarter.
        index: int64 of shape (rows,): which image each row is made of; None: one after the other.
        parts: int64 of shape (rows, 4): top, left, height and width of what is resized to the size
            of `out`, before it is mirrored and turned. Then top and left of `places` do not count.
        factors: int64 of shape (rows, 3), in 65536ths, from 0 to 100: of brightness, contrast and
            saturation, in this order. That of saturation is 1 where images are gray.
        boxes: int64 of shape (rows, 4): top, left, bottom and right of what is made 0, at last;
            what lies outside the image is left out.

    Raises:
        IndexError: an index is out of range.
        ValueError: an array has another dtype, shape or memory layout, they share memory, or a
            number is out of range. Nothing is written.
    """
    absent.warn_without(_change)
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
    if _use_c:
        index = np.ascontiguousarray(index, np.int64)
        _change(source, out, index, places, parts, factors, boxes, _VECTORS)
        return
    check_range(index, len(source), "the source has")
    for row, (at, (top, left, orientation)) in enumerate(
        zip(index.tolist(), places.tolist(), strict=True)
    ):
        if parts is None:
            part = _cut(source[at], top, left, size)
        else:
            part = _resized(source[at], parts[row], size)
        image = np.rot90(part[:, ::-1] if orientation & 4 else part, orientation & 3)
        out[row] = image if factors is None else _adjusted(image, *factors[row].tolist())
        if boxes is not None:
            top, left, bottom, right = boxes[row].clip(0).tolist()
            out[row, top:bottom, left:right] = 0


def _as_bytes(name: str, images: Images) -> npt.NDArray[np.uint8]:
    if images.ndim != 4 or not images.size or not images[0].flags.c_contiguous:
        raise ValueError(
            f"{name}: expected C-contiguous images of shape (rows, height, width, channels), found "
            f"shape {images.shape} and strides {images.strides}"
        )
    return images.view(np.uint8)


def _cut(image: Images, top: int, left: int, size: tuple[int, int]) -> Images:
    height, width = image.shape[:2]
    if top >= 0 and left >= 0 and top + size[0] <= height and left + size[1] <= width:
        return image[top : top + size[0], left : left + size[1]]
    part = np.zeros((*size, image.shape[2]), image.dtype)
    rows = np.arange(max(0, top), min(height, top + size[0]))
    columns = np.arange(max(0, left), min(width, left + size[1]))
    if len(rows) and len(columns):
        part[np.ix_(rows - top, columns - left)] = image[np.ix_(rows, columns)]
    return part


def _resized(image: Images, part: Integers, size: tuple[int, int]) -> Images:
    import torch

    top, left, height, width = part.tolist()
    crop = image[top : top + height, left : left + width]
    if crop.shape[:2] == size:
        return crop
    batch = torch.from_numpy(np.ascontiguousarray(crop)).unsqueeze(0).permute(0, 3, 1, 2)
    made = torch.nn.functional.interpolate(batch, size, mode="bilinear", antialias=True)
    return made[0].permute(1, 2, 0).numpy()


def _adjusted(image: Images, brightness: int, contrast: int, saturation: int) -> Images:
    values = image.astype(np.int64)
    if brightness != ONE:
        values = _cut_off(values * brightness)
    if contrast != ONE:
        count = values.shape[0] * values.shape[1]
        mean = (int(_gray(values).sum()) * ONE + count // 2) // count
        values = _cut_off(values * contrast + (((ONE - contrast) * mean) >> 16))
    if saturation != ONE:
        values = _cut_off(values * saturation + _gray(values) * (ONE - saturation))
    return values


def _gray(image: Integers) -> Integers:
    return image if image.shape[2] == 1 else ((image @ _GRAY) >> 16)[..., np.newaxis]


def _cut_off(values: Integers) -> Integers:
    return (values >> 16).clip(0, 255)
