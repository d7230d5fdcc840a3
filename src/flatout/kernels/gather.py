"""Rows of an array by index, with uint8 images scaled to float32 in the same pass.

The C extension and its numpy fallback give the same bytes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from flatout.kernels import absent
from flatout.kernels.checks import LARGEST, bytes_of_rows, check_range

try:
    from flatout.kernels import _gather as _c
except ImportError:
    _c = None  # type: ignore[assignment]

_use_c = _c is not None and absent.WANTED

# Kinds that the buffer protocol exports as plain numbers; all others go as bytes.
_NUMBERS = "biufc"


def available() -> bool:
    """Whether the C extension runs; otherwise its numpy fallback does."""
    return _use_c


def gather_rows(
    source: npt.NDArray[Any],
    index: npt.NDArray[np.int64],
    out: npt.NDArray[Any] | None = None,
    scale: float | None = None,
    shift: float | None = None,
) -> npt.NDArray[Any]:
    """`source[index]`, or `source[index] * scale + shift` in float32 for a uint8 source.

    Product and sum are each rounded to float32 (no fused multiply-add).

    Args:
        source: C-contiguous array of shape (rows, ...), of any dtype without Python objects.
        index: C-contiguous int64 array of shape (count,), each value in [0, rows).
        out: C-contiguous array of shape (count, ...) to write into; made where it is None. Its
            dtype is that of `source`, or float32 with `scale` or `shift`.
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
    _check(source, index, scaled)
    dtype = np.dtype(np.float32) if scaled else source.dtype
    shape = (index.shape[0], *source.shape[1:])
    if out is None:
        out = np.empty(shape, dtype)
    else:
        _check_out(out, shape, dtype, source, index)
    if scaled:
        _scaled(source, index, out, _finite("scale", scale, 1.0), _finite("shift", shift, 0.0))
    else:
        _plain(source, index, out)
    return out


def _plain(source: npt.NDArray[Any], index: npt.NDArray[np.int64], out: npt.NDArray[Any]) -> None:
    if not _use_c:
        check_range(index, source.shape[0], "the source has")
        # mode="clip" lets numpy write into `out` without a buffer between; nothing is out of range.
        np.take(source, index, axis=0, out=out, mode="clip")
    elif source.dtype.kind in _NUMBERS:
        _c.gather(source, index, out)
    else:
        _c.gather(bytes_of_rows(source), index, bytes_of_rows(out))


def _scaled(
    source: npt.NDArray[np.uint8],
    index: npt.NDArray[np.int64],
    out: npt.NDArray[np.float32],
    scale: float,
    shift: float,
) -> None:
    if _use_c:
        _c.gather_scaled(source, index, out, scale, shift)
        return
    check_range(index, source.shape[0], "the source has")
    rows = np.take(source, index, axis=0, mode="clip")
    with np.errstate(over="ignore"):
        np.multiply(rows, np.float32(scale), out=out, dtype=np.float32)
        np.add(out, np.float32(shift), out=out)


def _check(source: npt.NDArray[Any], index: npt.NDArray[Any], scaled: bool) -> None:
    absent.warn_without(_c)
    if source.ndim < 1 or source.dtype.hasobject:
        raise ValueError(
            "source: expected an array of rows without Python objects, "
            f"found {source.dtype} of shape {source.shape}"
        )
    if not source.flags.c_contiguous:
        raise ValueError("source: expected C-contiguous rows; use numpy.ascontiguousarray")
    if scaled and source.dtype != np.uint8:
        raise ValueError(f"source: scaling wants uint8, found {source.dtype}")
    if index.ndim != 1 or index.dtype != np.int64 or not _in_line(index):
        raise ValueError(
            "index: expected a C-contiguous int64 array of one dimension, "
            f"found {index.dtype} of shape {index.shape}"
        )


def _check_out(
    out: npt.NDArray[Any],
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    source: npt.NDArray[Any],
    index: npt.NDArray[Any],
) -> None:
    if out.shape != shape or out.dtype != dtype:
        raise ValueError(
            f"out: expected {dtype} of shape {shape}, found {out.dtype} of shape {out.shape}"
        )
    if not (_in_line(out) and out.flags.writeable):
        raise ValueError("out: expected C-contiguous, aligned memory that can be written")
    if np.may_share_memory(out, source) or np.may_share_memory(out, index):
        raise ValueError("out shares memory with the source or the index")


def _in_line(array: npt.NDArray[Any]) -> bool:
    return array.flags.c_contiguous and array.flags.aligned


def _finite(name: str, value: float | None, default: float) -> float:
    if value is None:
        return default
    if not abs(value) <= LARGEST:
        raise ValueError(f"{name}: expected a finite float32 number, found {value}")
    return value
