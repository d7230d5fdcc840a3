"""Rows of an array by index, with uint8 images scaled to float32 in the same pass."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from flatout.kernels import missing_extension
from flatout.kernels.checks import LARGEST, bytes_of_rows

_c = missing_extension.optional("_gather")

# Kinds that the buffer protocol exports as plain numbers; all others go as bytes.
_NUMBERS = "biufc"


def available() -> bool:
    """Return whether the C extension is built; otherwise numpy does its work."""
    return _c is not None


def gather_rows(
    source: npt.NDArray[Any],
    index: npt.NDArray[np.int64],
    out: npt.NDArray[Any] | None = None,
    scale: float | None = None,
    shift: float | None = None,
) -> npt.NDArray[Any]:
    """Return `source[index]`, or `source[index] * scale + shift` in float32 for a uint8 source.

    Product and sum are each rounded to float32 (no fused multiply-add).

    Args:
        source: C-contiguous array of shape (rows, ...), of any dtype without Python objects.
        index: C-contiguous int64 array of shape (count,), each value in [0, rows).
        out: C-contiguous array of shape (count, ...) to write into; None makes one. Its dtype is
            that of `source`, or float32 with `scale` or `shift`.
        scale: finite factor; 1 where only `shift` is given.
        shift: finite summand; 0 where only `scale` is given.

    Returns:
        `out`.

    Raises:
        IndexError: an index is negative or too large; names position and value. Nothing is written.
        ValueError: an array has another dtype, shape or memory layout, or `out` shares memory with
            `source` or `index`.
    """
    scaled = scale is not None or shift is not None
    dtype = np.dtype(np.float32) if scaled else source.dtype
    shape = (*index.shape, *source.shape[1:])
    if out is None:
        out = np.empty(shape, dtype)
    elif out.shape != shape or out.dtype != dtype:
        raise ValueError(
            f"out: expected {dtype} of shape {shape}, found {out.dtype} of shape {out.shape}"
        )
    if scaled:
        _scaled(source, index, out, _finite("scale", scale, 1.0), _finite("shift", shift, 0.0))
    elif _c is None:
        np.copyto(out, source[index])
    elif source.dtype.kind in _NUMBERS:
        _c.gather(source, index, out)
    else:
        _c.gather(bytes_of_rows(source), index, bytes_of_rows(out))
    return out


def _scaled(
    source: npt.NDArray[np.uint8],
    index: npt.NDArray[np.int64],
    out: npt.NDArray[np.float32],
    scale: float,
    shift: float,
) -> None:
    if _c is not None:
        _c.gather_scaled(source, index, out, scale, shift)
        return
    with np.errstate(over="ignore"):
        np.multiply(source[index], np.float32(scale), out=out, dtype=np.float32)
        np.add(out, np.float32(shift), out=out)


def _finite(name: str, value: float | None, default: float) -> float:
    if value is None:
        return default
    if not abs(value) <= LARGEST:
        raise ValueError(f"{name}: expected a finite float32 number, found {value}")
    return value
