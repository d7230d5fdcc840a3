"""Rows of Criteo's click logs to columns: a label, integers, hexadecimal categories."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from flatout.kernels import missing_extension
from flatout.kernels.checks import LARGEST, Fault, Numbers

_c = missing_extension.required("_criteo")

# Tests set this to run the code for processors without AVX2.
_is_plain = False


class Bad(Fault):
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
    """Parse the rows `buffer[starts[i]:ends[i]]`, and return the number of bad rows (see `Fault`).

    A row is a label (an integer), then integers, then categories of 1 to 8 hexadecimal digits,
    separated by tabs. Integers and categories may be empty. An integer is a fault beyond the limits
    of its dtype, or of int64 for float32.

    Args:
        labels: float32, int32 or int64 of shape (rows,) to write into; None drops them.
        integers: float32, int32 or int64 of shape (rows, integers in a row) to write into.
        categories: int32 or int64 of shape (rows, categories in a row) to write into. Without
            `buckets`, int32 gets the same 32 bits, so that 80000000 and more become negative.
        missing_category: the value of an empty category, written as it is: not modulo `buckets`.
        buckets: write the category modulo this; 0 writes it whole. int32 takes at most 2^31.

    Raises:
        ValueError: an array has another dtype, shape or memory layout, arrays share memory, or a
            number does not fit. Nothing is written.
    """
    missing_integer = _fitting("missing_integer", missing_integer, integers.dtype)
    missing_category = int(_fitting("missing_category", missing_category, categories.dtype))
    if not 0 <= buckets <= (2**31 if categories.dtype == np.int32 else 2**63 - 1):
        raise ValueError(
            "buckets: expected 0 or more, at most 2^31 for int32 and below 2^63 for int64; found "
            f"{buckets}"
        )
    arrays = (starts, ends, labels, integers, categories, status, at)
    numbers = (missing_integer, missing_category, buckets)
    return int(_c.parse(buffer, *arrays, has_label, *numbers, _is_plain))


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
