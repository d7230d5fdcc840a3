"""8-bit images resized by linear interpolation in fixed point.

The result equals OpenCV's `resize(..., interpolation=INTER_LINEAR)` except for one gray level:
OpenCV's vector code rounds like this, and its code for the rest of a vector slightly differently.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from flatout.kernels import missing_extension

_c = missing_extension.required("_resize")


Pixels: TypeAlias = npt.NDArray[np.uint8]

_ONE = 2048
# `Pixel` and `Values` of core.h.
_PIXEL = np.dtype([("first", np.int32), ("weights", np.int16, 2)])
_VALUES = np.dtype(
    [("offsets", np.int32, 4), ("picks", np.uint8, (4, 16)), ("weights", np.int16, (4, 8))]
)
# The order of the groups in the C code, for vectors with four values in each of four groups.
_GROUPS = [0, 2, 1, 3]
# _WINDOW: bytes of the window from which a group picks its values. _ZERO: the index that picks a
# zero.
_WINDOW, _ZERO = 16, 0x80
# Maximum number of tables that are kept: one for each length of an axis and of its result.
_KEPT = 512


def resize_linear(source: Pixels, out: Pixels) -> None:
    """Resize an image by linear interpolation between the two nearest rows and columns.

    Shrinking is not antialiased: below half the size, pixels are left out. Pixels' centers are
    aligned, as in OpenCV, Pillow and torch (`align_corners=False`). Weights are multiples of
    1/2048. A value differs from the rounded exact result by at most one.

    Args:
        source: uint8 of shape (height, width, channels). Rows are contiguous and in ascending
            order; there may be gaps between rows, as in a part of a larger image.
        out: the result, of the same dtype and layout, of any height and width, in other memory.

    Raises:
        ValueError: an array has another dtype, shape or memory layout, or they share memory.
    """
    _check("source", source)
    _check("out", out)
    height, width, channels = source.shape
    if out.shape[2] != channels:
        raise ValueError(f"out: expected the source's {channels} channels, found {out.shape[2]}")
    if not out.flags.writeable:
        raise ValueError("out: expected memory that can be written")
    if np.may_share_memory(source, out):
        raise ValueError("out shares memory with the source")
    rows, columns = _bytes_of_axis(height, out.shape[0]), _bytes_of_axis(width, out.shape[1])
    _c.linear(source, out, rows, columns, _values(width, out.shape[1], channels))


def _check(name: str, image: npt.NDArray[Any]) -> None:
    if image.dtype != np.uint8 or image.ndim != 3 or image.size == 0:
        raise ValueError(
            f"{name}: expected uint8 of shape (height, width, channels), none of them 0; "
            f"found {image.dtype} of shape {image.shape}"
        )
    _, width, channels = image.shape
    line, pixel, value = image.strides
    if value != 1 or pixel != channels or line < width * channels:
        raise ValueError(
            f"{name}: expected contiguous rows in ascending order, found strides {image.strides}; "
            "use numpy.ascontiguousarray"
        )


def _axis(length: int, result: int) -> npt.NDArray[Any]:
    at = ((np.arange(result) + 0.5) * (length / result) - 0.5).astype(np.float32)
    at = at.clip(0, length - 1)
    table = np.empty(result, _PIXEL)
    table["first"] = np.minimum(at, max(0, length - 2))
    second = np.rint((at - table["first"].astype(np.float32)) * _ONE)
    table["weights"] = np.stack([_ONE - second, second], axis=1)
    return table


@lru_cache(_KEPT)
def _bytes_of_axis(length: int, result: int) -> bytes:
    return _axis(length, result).tobytes()


@lru_cache(_KEPT)
def _values(length: int, result: int, channels: int) -> bytes:
    columns = _axis(length, result)
    first = columns["first"][:, np.newaxis] * channels + np.arange(channels)
    weights = columns["weights"].repeat(channels, axis=0)
    # The padding of the last vector repeats the last value.
    filled = -first.size % 16
    first = np.pad(first.reshape(-1), (0, filled), "edge").reshape(-1, 4, 4)
    weights = np.pad(weights, ((0, filled), (0, 0)), "edge").reshape(-1, 4, 8)
    last = first + (channels if length > 1 else 0)
    offsets = np.minimum(first.min(axis=2), length * channels - _WINDOW)
    if offsets.min() < 0 or (last.max(axis=2) - offsets).max() >= _WINDOW:
        return b""
    picks = np.full((*first.shape, 4), _ZERO, np.uint8)
    picks[..., 0] = first - offsets[..., np.newaxis]
    picks[..., 2] = last - offsets[..., np.newaxis]
    table = np.empty(len(first), _VALUES)
    table["offsets"] = offsets[:, _GROUPS]
    table["picks"] = picks.reshape(-1, 4, 16)[:, _GROUPS]
    table["weights"] = weights[:, _GROUPS]
    return table.tobytes()
