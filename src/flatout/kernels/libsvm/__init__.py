"""Rows of LibSVM text: `label [qid:n] index:value index:value ... # comment`.

A row begins with a label, a decimal number with or without sign, point and exponent. Then there may
be `qid:` and an integer. Then come pairs of an index, which ascends within the row, and a decimal
number. Any number of spaces and tabs separates these, and may be at the begin and the end. A
comment extends from `#` to the row's end. The row's bytes may end with "\\n" or "\\r\\n".

Numbers become the nearest double, and that becomes the nearest float32 if requested. Text for NaN
or infinity, and numbers that would become infinity, are bad.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from flatout.kernels import missing_extension
from flatout.kernels.checks import Fault, Numbers

_c = missing_extension.required("_libsvm")

# Tests set this to run the code for processors without AVX2.
_is_plain = False

# Larger than any valid index.
NO_LIMIT = 2**63 - 1


class Bad(Fault):
    OUTSIDE = 1, "expected a row inside the buffer, found a byte range that is not"
    NO_LABEL = 2, "expected a label, found none"
    MULTI_LABEL = 3, "expected one label, found several with commas between them"
    NOT_WHOLE = 4, "expected a label that is a whole number below 2^53 in size, found another"
    LABEL = 5, "expected a decimal number for a label, found something else"
    QID = 6, "expected a whole number after qid:, found something else"
    INDEX = 7, "expected a whole number for an index, found something else"
    VALUE = 8, "expected a decimal number for a value, found something else"
    NO_COLON = 9, "expected a colon after an index, found the end of the pair"
    TOO_LARGE = 10, "expected a whole number below 2^63, found a larger one"
    NOT_FINITE = 11, "expected a finite number, found NaN, infinity or a number too large"
    BELOW_BASE = 12, "expected an index of at least the base (0 or 1), found a smaller one"
    BEYOND_LIMIT = 13, "expected an index within the schema's features, found one beyond"
    UNORDERED = 14, "expected indices that ascend, found one that is not above the one before"
    TOO_MANY = 15, "expected fewer pairs in the row, found more than there is room for"
    TWO_LINES = 16, "expected one line, found a newline inside the row"


def survey(
    buffer: Any,
    starts: Numbers,
    ends: Numbers,
    *,
    lengths: npt.NDArray[np.int32],
    labels: npt.NDArray[np.float64],
    qid: Numbers,
    status: npt.NDArray[np.uint8],
    at: Numbers,
    base: int = 0,
    limit: int = NO_LIMIT,
    width: int = 2**31 - 1,
    label_as: npt.DTypeLike = np.float64,
) -> tuple[int, int, int]:
    """Read rows without keeping their pairs; return the numbers of bad rows, and the index limits.

    A row is good here exactly if it is good for `parse` or `dense` with the same base, limit, room
    and dtypes. `lengths` gets the pairs of each row. The limits are the smallest and the largest
    index of good rows.
    """
    outputs = (labels, qid, lengths, status, at)
    rules = (base, limit, width, np.dtype(label_as).name)
    bad, low, high = _c.survey(buffer, starts, ends, *outputs, *rules, _is_plain)
    return bad, low, high


def parse(
    buffer: Any,
    starts: Numbers,
    ends: Numbers,
    offsets: Numbers,
    *,
    base: int,
    limit: int,
    labels: npt.NDArray[Any],
    ids: npt.NDArray[Any],
    values: npt.NDArray[Any],
    status: npt.NDArray[np.uint8],
    at: Numbers,
    qid: Numbers | None = None,
) -> int:
    """Parse rows into indices and values, and return the number of bad rows (see `Fault`).

    Row i is written to `ids[offsets[i]:offsets[i + 1]]`, and to the same part of `values`; the rest
    of this part becomes 0. So `np.arange(rows + 1) * width` pads rows to a width, and the running
    sum of the lengths makes compressed sparse rows. A row that does not fit is bad.

    Args:
        offsets: int64 of shape (rows + 1,), ascending.
        base: the smallest index, 0 or 1; it is subtracted from each.
        limit: number of indices from `base` on.
        labels: float32, float64 or int64 of shape (rows,), to write into. With int64, a label that
            is not an integer, or has a size of 2^53 or more, is bad.
        ids: int64 or int32 of shape (items,), to write into. With int32 the limit is at most 2^31.
        qid: int64 of shape (rows,), to write into; -1 if a row has none. None drops them.

    Raises:
        ValueError: an array has another dtype, shape or memory layout, or `offsets` do not ascend
            within `ids`.
    """
    outputs = (labels, qid, ids, values, status, at)
    return int(_c.parse(buffer, starts, ends, offsets, *outputs, base, limit, _is_plain))


def dense(
    buffer: Any,
    starts: Numbers,
    ends: Numbers,
    *,
    base: int,
    limit: int,
    labels: npt.NDArray[Any],
    out: npt.NDArray[np.float32],
    status: npt.NDArray[np.uint8],
    at: Numbers,
    qid: Numbers | None = None,
) -> int:
    """Parse rows into vectors with an element for each index."""
    outputs = (labels, qid, out, status, at)
    return int(_c.dense(buffer, starts, ends, *outputs, base, limit, _is_plain))
