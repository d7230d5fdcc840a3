"""Rows of Criteo's click logs to columns: a label, integers, hexadecimal categories.

The C extension and its fallback in plain Python give the same bytes.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from flatout.kernels import absent
from flatout.kernels.checks import LARGEST, Fault, Numbers, Wrong, check_apart, check_array, text_of

try:
    from flatout.kernels import _criteo as _c
except ImportError:
    _c = None  # type: ignore[assignment]

_use_c = _c is not None and absent.WANTED
# Tests set this, to see what processors without AVX2 do.
_is_plain = False

_NUMBERS = ("float32", "int64", "int32")
_HEX = frozenset(b"0123456789abcdefABCDEF")


class Bad(Fault):
    """What is wrong with a row."""

    TOO_FEW_FIELDS = 1, "expected a tab and another field, found the end of the row"
    TOO_MANY_FIELDS = 2, "expected the end of the row, found a tab and another field"
    LABEL = 3, "expected a label of decimal digits, found something else"
    INTEGER = (
        4,
        "expected decimal digits, with or without a minus, or nothing; found something else",
    )
    INTEGER_OVERFLOW = 5, "expected an integer that fits into its dtype, found a larger one"
    HEX = 6, "expected hexadecimal digits or nothing, found something else"
    HEX_TOO_LONG = 7, "expected at most 8 hexadecimal digits, found more"
    OUTSIDE = 8, "expected a row inside the buffer, found a byte range that is not"


def available() -> bool:
    """Whether the C extension runs; otherwise its fallback does."""
    return _use_c


def parse(
    buffer: Any,
    starts: Numbers,
    ends: Numbers,
    *,
    labels: npt.NDArray[Any] | None,
    integers: npt.NDArray[Any],
    categories: npt.NDArray[Any],
    status: npt.NDArray[np.uint8],
    at: Numbers,
    missing_integer: float = 0,
    missing_category: int = 0,
    buckets: int = 0,
    has_label: bool = True,
) -> int:
    """Parse the rows `buffer[starts[i]:ends[i]]`.

    A row is a label (an integer), then integers, then categories of 1 to 8 hexadecimal digits, with
    a tab between each two. Integers and categories may be empty. An integer is at fault beyond the
    limits of its dtype, or of int64 where that is float32.

    Args:
        buffer: C-contiguous memory with the buffer protocol: bytes, a memory map, an array.
        starts: first byte of each row, int64 of shape (rows,).
        ends: one after the last byte, where a newline may stand.
        labels: float32, int32 or int64 of shape (rows,) to write into; None drops them.
        integers: float32, int32 or int64 of shape (rows, integers in a row) to write into.
        categories: int32 or int64 of shape (rows, categories in a row) to write into. Without
            `buckets`, int32 gets the same 32 bits, so that 80000000 and more come out negative.
        status: uint8 of shape (rows,) to write into: 0 for a good row, else a `Bad`.
        at: int64 of shape (rows,): where in the buffer a bad row goes wrong. Places of good rows
            stay as they are. All other outputs of a bad row become 0.
        missing_integer: what an empty integer becomes; float32 also takes NaN.
        missing_category: what an empty category becomes, as it is: not modulo `buckets`.
        buckets: write the category modulo this; 0 writes it whole. int32 takes at most 2^31.
        has_label: whether rows begin with a label.

    Returns:
        How many rows are bad.

    Raises:
        ValueError: an array has another dtype, shape or memory layout, arrays share memory, or a
            number does not fit. Nothing is written.
    """
    absent.warn_without(_c)
    missing_integer = _fitting("missing_integer", missing_integer, integers.dtype)
    missing_category = int(_fitting("missing_category", missing_category, categories.dtype))
    if not 0 <= buckets <= (2**31 if categories.dtype == np.int32 else 2**63 - 1):
        raise ValueError(
            "buckets: expected 0 or more, at most 2^31 for int32 and below 2^63 for int64; found "
            f"{buckets}"
        )
    arrays = (starts, ends, labels, integers, categories, status, at)
    numbers = (missing_integer, missing_category, buckets)
    if _use_c:
        return _c.parse(buffer, *arrays, has_label, *numbers, _is_plain)
    return _parse_fallback(buffer, *arrays, has_label, *numbers)


def _fitting(name: str, value: float, dtype: np.dtype[Any]) -> float:
    if dtype == np.float32:
        number = float(value)
        if math.isnan(number) or abs(number) <= LARGEST:
            return number
    elif isinstance(value, int) or float(value).is_integer():
        half = 2**31 if dtype == np.int32 else 2**63
        if -half <= value < half:
            return int(value)
    raise ValueError(f"{name}: expected a number that fits into {dtype}, found {value}")


def _parse_fallback(
    buffer: Any,
    starts: Numbers,
    ends: Numbers,
    labels: npt.NDArray[Any] | None,
    integers: npt.NDArray[Any],
    categories: npt.NDArray[Any],
    status: npt.NDArray[np.uint8],
    at: Numbers,
    has_label: bool,
    missing_integer: float,
    missing_category: int,
    buckets: int,
) -> int:
    text, rows = text_of("buffer", buffer), starts.size
    outputs: list[tuple[str, npt.NDArray[Any], tuple[str, ...], tuple[int | None, ...]]] = [
        ("integers", integers, _NUMBERS, (rows, None)),
        ("categories", categories, _NUMBERS[1:], (rows, None)),
        ("status", status, ("uint8",), (rows,)),
        ("at", at, ("int64",), (rows,)),
    ]
    if labels is not None:
        outputs.append(("labels", labels, _NUMBERS, (rows,)))
    check_array("starts", starts, ("int64",), (rows,), is_written=False)
    check_array("ends", ends, ("int64",), (rows,), is_written=False)
    for output in outputs:
        check_array(*output)
    check_apart([output[1] for output in outputs], [text, starts, ends])
    if labels is not None and not has_label:
        raise ValueError("labels: expected None, because the rows have none")
    if has_label + integers.shape[1] + categories.shape[1] == 0:
        raise ValueError("categories: expected at least one field in a row")
    label_dtype = np.dtype(np.int64) if labels is None else labels.dtype

    def row_of(start: int, end: int) -> tuple[int, list[float], list[int]]:
        if not 0 <= start <= end <= len(text):
            raise Wrong(Bad.OUTSIDE, start)
        fields = text[start:end].tobytes().split(b"\t")
        label, numbers, hashes = 0, [], []
        for field in range(has_label + integers.shape[1] + categories.shape[1]):
            if field == len(fields):
                raise Wrong(Bad.TOO_FEW_FIELDS, end)
            result = fields[field]
            if field < has_label:
                label = _integer(result, start, label_dtype, Bad.LABEL)
            elif field < has_label + integers.shape[1]:
                number = _integer(result, start, integers.dtype, Bad.INTEGER) if result else None
                numbers.append(missing_integer if number is None else number)
            else:
                hashes.append(_category(result, start, buckets) if result else missing_category)
            start += len(result) + 1
        if start <= end:
            raise Wrong(Bad.TOO_MANY_FIELDS, start - 1)
        return label, numbers, hashes

    bad = 0
    for row, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
        try:
            label, numbers, hashes = row_of(start, end)
            status[row] = 0
        except Wrong as wrong:
            label, numbers, hashes = 0, [0] * integers.shape[1], [0] * categories.shape[1]
            status[row], at[row] = wrong.bad, wrong.at
            bad += 1
        if labels is not None:
            labels[row] = label
        integers[row] = numbers
        categories[row] = np.array(hashes, np.int64).astype(categories.dtype)
    return bad


def _integer(field: bytes, start: int, dtype: np.dtype[Any], bad: Bad) -> int:
    sign = len(field) - len(field.removeprefix(b"-"))
    for place in range(sign, len(field)):
        if not 0x30 <= field[place] <= 0x39:
            raise Wrong(bad, start + place)
    if sign == len(field):
        raise Wrong(bad, start + sign)
    # Python refuses to read some thousands of digits; 20 are too many already.
    digits = field[sign:].lstrip(b"0") or b"0"
    value = int(digits[:20]) * (-1 if sign else 1)
    limits = np.iinfo(np.int32 if dtype == np.int32 else np.int64)
    if not limits.min <= value <= limits.max:
        raise Wrong(Bad.INTEGER_OVERFLOW, start)
    return value


def _category(field: bytes, start: int, buckets: int) -> int:
    for place, byte in enumerate(field):
        if byte not in _HEX:
            raise Wrong(Bad.HEX, start + place)
        if place == 8:
            raise Wrong(Bad.HEX_TOO_LONG, start + place)
    value = int(field, 16)
    return value % buckets if buckets else value
