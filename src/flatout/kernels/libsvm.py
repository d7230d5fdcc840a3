"""Rows of LibSVM text: `label [qid:n] index:value index:value ... # comment`.

The C extension and its fallback in plain Python give the same bytes.

A row begins with a label, a decimal number with or without sign, point and exponent. Then there
may be `qid:` and a whole number. Then come pairs of an index, which ascends within the row, and a
decimal number. Spaces and tabs stand between these, any number of them, and may stand before and
after; a comment goes from `#` to the row's end. The row's bytes may end with "\\n" or "\\r\\n".

Numbers become the nearest double, and that, where asked for, the nearest float32. Text for NaN or
infinity, and numbers that would become infinity, are bad.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from flatout.kernels import absent
from flatout.kernels.checks import Fault, Numbers, Wrong, check_apart, check_array, text_of

try:
    from flatout.kernels import _libsvm as _c
except ImportError:
    _c = None  # type: ignore[assignment]

_use_c = _c is not None and absent.WANTED
# Tests set this, to see what processors without AVX2 do.
_is_plain = False

# Larger than any index that is good.
NO_LIMIT = 2**63 - 1
_INT32 = 2**31


class Bad(Fault):
    """What is wrong with a row."""

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


def available() -> bool:
    """Whether the C extension runs; otherwise its fallback does."""
    return _use_c


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
    value_as: npt.DTypeLike = np.float32,
) -> tuple[int, int, int]:
    """Read rows without keeping their pairs.

    A row is good here exactly if it is good for `parse` or `dense` with the same base, limit, room
    and dtypes.
    """
    absent.warn_without(_c)
    outputs = (labels, qid, lengths, status, at)
    rules = (base, limit, width, np.dtype(label_as).name, np.dtype(value_as).name)
    if _use_c:
        return _c.survey(buffer, starts, ends, *outputs, *rules, _is_plain)
    return _survey_fallback(buffer, starts, ends, *outputs, *rules)


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
    """Read rows to indices and values.

    Row i goes to `ids[offsets[i]:offsets[i + 1]]`, and to the same part of `values`; what is left
    of it becomes 0. So `np.arange(rows + 1) * width` pads rows to a width, and the running sum of
    the lengths makes compressed sparse rows. A row that does not fit is bad.

    Args:
        buffer: as in `survey`.
        starts: as in `survey`.
        ends: as in `survey`.
        offsets: int64 of shape (rows + 1,), ascending.
        base: the smallest index, 0 or 1; it is subtracted from each.
        limit: how many indices there are from `base` on.
        labels: float32, float64 or int64 of shape (rows,), to write into. With int64, a label that
            is not a whole number, or 2^53 and more in size, is bad.
        ids: int64 or int32 of shape (items,), to write into. With int32 the limit is at most 2^31.
        values: float32 or float64 of shape (items,), to write into.
        status: as in `survey`.
        at: as in `survey`.
        qid: int64 of shape (rows,), to write into; -1 where a row has none. None drops them.

    Returns:
        How many rows are bad.

    Raises:
        ValueError: as in `survey`; or `offsets` do not ascend within `ids`.
    """
    absent.warn_without(_c)
    outputs = (labels, qid, ids, values, status, at)
    if _use_c:
        return _c.parse(buffer, starts, ends, offsets, *outputs, base, limit, _is_plain)
    return _parse_fallback(buffer, starts, ends, offsets, *outputs, base, limit)


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
    """Read rows to vectors with a place for each index."""
    absent.warn_without(_c)
    outputs = (labels, qid, out, status, at)
    if _use_c:
        return _c.dense(buffer, starts, ends, *outputs, base, limit, _is_plain)
    return _dense_fallback(buffer, starts, ends, *outputs, base, limit)


# ---- the fallback: a row ----


class _Rules(NamedTuple):
    """What a row has to keep to."""

    base: int
    limit: int
    label_as: np.dtype[Any]
    value_as: np.dtype[Any]


class _Row(NamedTuple):
    label: float
    qid: int
    indices: list[int]
    values: list[float]


_BLANKS = re.compile(rb"[ \t]*")
_OVER = re.compile(rb"[ \t#]|\Z")
_DIGITS = re.compile(rb"[0-9]+")
_DECIMAL = re.compile(rb"[+-]?([0-9]*)(?:\.([0-9]*))?")
_POWER = re.compile(rb"[eE][+-]?([0-9]*)")
_WORD = re.compile(rb"[+-]?(?:nan|inf|infinity)(?![0-9a-z])", re.IGNORECASE)

# Halfway between the largest float32 and the next power of two, rounding goes up, and beyond.
_BOUNDS = {"float32": float.fromhex("0x1.ffffffp127")}


def _number(row: bytes, at: int, bad: Bad) -> tuple[float, int]:
    match = _DECIMAL.match(row, at)
    assert match is not None  # it matches nothing at all as well
    end = match.end()
    if not match[1] and not match[2]:
        raise Wrong(Bad.NOT_FINITE, at) if _WORD.match(row, at) else Wrong(bad, end)
    power = _POWER.match(row, end)
    if power is not None:
        end = power.end()
        if not power[1]:
            raise Wrong(bad, end)
    return float(row[at:end]), end


def _whole(row: bytes, at: int, bad: Bad) -> tuple[int, int]:
    match = _DIGITS.match(row, at)
    if match is None:
        raise Wrong(bad, at)
    # Python refuses to read some thousands of digits; 20 are too many already.
    value = int(match[0].lstrip(b"0")[:20] or b"0")
    if value > NO_LIMIT:
        raise Wrong(Bad.TOO_LARGE, at)
    return value, match.end()


def _skip(row: bytes, at: int) -> int:
    match = _BLANKS.match(row, at)
    return at if match is None else match.end()


def _label(row: bytes, rules: _Rules) -> tuple[float, int]:
    token = _skip(row, 0)
    if _OVER.match(row, token) or row.startswith(b"qid:", token):
        raise Wrong(Bad.NO_LABEL, token)
    label, at = _number(row, token, Bad.LABEL)
    if row.startswith(b",", at):
        raise Wrong(Bad.MULTI_LABEL, at)
    if row.startswith(b":", at):
        raise Wrong(Bad.NO_LABEL, token)
    if not _OVER.match(row, at):
        raise Wrong(Bad.LABEL, at)
    if not abs(label) < _BOUNDS.get(rules.label_as.name, float("inf")):
        raise Wrong(Bad.NOT_FINITE, token)
    if rules.label_as == np.int64 and not (abs(label) < 2**53 and label.is_integer()):
        raise Wrong(Bad.NOT_WHOLE, token)
    return label, at


def _qid(row: bytes, at: int) -> tuple[int, int]:
    at = _skip(row, at)
    if not row.startswith(b"qid:", at):
        return -1, at
    qid, at = _whole(row, at + len(b"qid:"), Bad.QID)
    if not _OVER.match(row, at):
        raise Wrong(Bad.QID, at)
    return qid, at


def _pair(row: bytes, at: int, rules: _Rules) -> tuple[int, float, int]:
    if row.startswith(b"-", at) and _DIGITS.match(row, at + 1):
        raise Wrong(Bad.BELOW_BASE, at)
    index, at = _whole(row, at, Bad.INDEX)
    if not row.startswith(b":", at):
        raise Wrong(Bad.NO_COLON if _OVER.match(row, at) else Bad.INDEX, at)
    value, end = _number(row, at + 1, Bad.VALUE)
    if not _OVER.match(row, end):
        raise Wrong(Bad.VALUE, end)
    if not abs(value) < _BOUNDS.get(rules.value_as.name, float("inf")):
        raise Wrong(Bad.NOT_FINITE, at + 1)
    return index, value, end


def _read_row(row: bytes, room: int, rules: _Rules) -> _Row:
    label, at = _label(row, rules)
    qid, at = _qid(row, at)
    indices: list[int] = []
    values: list[float] = []
    while not _OVER.match(row, at := _skip(row, at)):
        index, value, end = _pair(row, at, rules)
        if index < rules.base:
            raise Wrong(Bad.BELOW_BASE, at)
        if index - rules.base >= rules.limit:
            raise Wrong(Bad.BEYOND_LIMIT, at)
        if indices and index <= indices[-1]:
            raise Wrong(Bad.UNORDERED, at)
        if len(indices) == room:
            raise Wrong(Bad.TOO_MANY, at)
        indices.append(index)
        values.append(value)
        at = end
    newline = row.find(b"\n", at)
    if newline >= 0:
        raise Wrong(Bad.TWO_LINES, newline)
    return _Row(label, qid, indices, values)


def _good_row(text: npt.NDArray[np.uint8], start: int, end: int, room: int, rules: _Rules) -> _Row:
    if not 0 <= start <= end <= len(text):
        raise Wrong(Bad.OUTSIDE, start)
    row = text[start:end].tobytes().rstrip(b" \t\r\n")
    try:
        return _read_row(row, room, rules)
    except Wrong as wrong:
        bad = wrong.bad
        if bad in (Bad.LABEL, Bad.QID, Bad.INDEX, Bad.VALUE) and row.startswith(b"\n", wrong.at):
            bad = Bad.TWO_LINES
        raise Wrong(bad, start + wrong.at) from None


# ---- the fallback: rows ----


class _Rows(NamedTuple):
    """What all calls have."""

    buffer: Any
    starts: Numbers
    ends: Numbers
    labels: npt.NDArray[Any]
    qid: Numbers | None
    status: npt.NDArray[np.uint8]
    at: Numbers
    base: int
    limit: int


def _each(
    rows: _Rows, rooms: Sequence[int], label_as: np.dtype[Any], value_as: np.dtype[Any]
) -> Iterator[tuple[int, _Row | None]]:
    rules = _Rules(rows.base, rows.limit, label_as, value_as)
    text = text_of("buffer", rows.buffer)
    ranges = zip(rows.starts.tolist(), rows.ends.tolist(), rooms, strict=True)
    for number, (start, end, room) in enumerate(ranges):
        row: _Row | None = None
        try:
            row = _good_row(text, start, end, room, rules)
            rows.status[number] = 0
        except Wrong as wrong:
            rows.status[number], rows.at[number] = wrong.bad, wrong.at
        rows.labels[number] = 0 if row is None else row.label
        if rows.qid is not None:
            rows.qid[number] = 0 if row is None else row.qid
        yield number, row


def _survey_fallback(
    buffer: Any,
    starts: Numbers,
    ends: Numbers,
    labels: npt.NDArray[np.float64],
    qid: Numbers,
    lengths: npt.NDArray[np.int32],
    status: npt.NDArray[np.uint8],
    at: Numbers,
    base: int,
    limit: int,
    width: int,
    label_as: str,
    value_as: str,
) -> tuple[int, int, int]:
    rows = _Rows(buffer, starts, ends, labels, qid, status, at, base, limit)
    _check(rows, [lengths])
    _check_array("labels", labels, ("float64",), len(starts))
    _check_array("lengths", lengths, ("int32",), len(starts))
    if label_as not in _LABELS or value_as not in _VALUES or width < 0:
        raise ValueError(
            "expected labels as float32, float64 or int64, values as float32 or float64, "
            "and a width of 0 or more"
        )
    bad, low, high = 0, NO_LIMIT, -1
    rooms = [min(width, _INT32 - 1)] * len(starts)
    for number, row in _each(rows, rooms, np.dtype(label_as), np.dtype(value_as)):
        bad += row is None
        lengths[number] = 0 if row is None else len(row.indices)
        if row is not None and row.indices:
            low, high = min(low, row.indices[0]), max(high, row.indices[-1])
    return bad, low, high


def _parse_fallback(
    buffer: Any,
    starts: Numbers,
    ends: Numbers,
    offsets: Numbers,
    labels: npt.NDArray[Any],
    qid: Numbers | None,
    ids: npt.NDArray[Any],
    values: npt.NDArray[Any],
    status: npt.NDArray[np.uint8],
    at: Numbers,
    base: int,
    limit: int,
) -> int:
    rows = _Rows(buffer, starts, ends, labels, qid, status, at, base, limit)
    _check(rows, [ids, values], offsets)
    _check_array("offsets", offsets, ("int64",), len(starts) + 1, is_written=False)
    _check_array("ids", ids, ("int32", "int64"), None)
    _check_array("values", values, _VALUES, len(ids))
    if offsets[0] < 0 or offsets[-1] > len(ids) or (np.diff(offsets) < 0).any():
        raise ValueError(f"offsets: expected numbers that ascend from 0 to at most {len(ids)}")
    if ids.dtype == np.int32:
        rows = rows._replace(limit=min(limit, _INT32))
    bad = 0
    for number, row in _each(rows, np.diff(offsets).tolist(), labels.dtype, values.dtype):
        place = slice(offsets[number], offsets[number + 1])
        ids[place] = values[place] = 0
        if row is None:
            bad += 1
        else:
            place = slice(offsets[number], offsets[number] + len(row.indices))
            ids[place] = np.array(row.indices, np.int64) - base
            values[place] = row.values
    return bad


def _dense_fallback(
    buffer: Any,
    starts: Numbers,
    ends: Numbers,
    labels: npt.NDArray[Any],
    qid: Numbers | None,
    out: npt.NDArray[np.float32],
    status: npt.NDArray[np.uint8],
    at: Numbers,
    base: int,
    limit: int,
) -> int:
    rows = _Rows(buffer, starts, ends, labels, qid, status, at, base, limit)
    _check(rows, [out])
    check_array("out", out, ("float32",), (len(starts), limit))
    bad = 0
    rooms = [NO_LIMIT] * len(starts)
    for number, row in _each(rows, rooms, labels.dtype, np.dtype(np.float32)):
        out[number] = 0
        if row is None:
            bad += 1
        else:
            out[number, np.array(row.indices, np.int64) - base] = row.values
    return bad


_LABELS = ("float32", "float64", "int64")
_VALUES = ("float32", "float64")


def _check(
    rows: _Rows, outputs: Sequence[npt.NDArray[Any]], offsets: Numbers | None = None
) -> None:
    count = rows.starts.size
    text = memoryview(rows.buffer)
    if not (text.c_contiguous and text.format == "B" and text.ndim == 1):
        raise ValueError("buffer: expected C-contiguous memory, one dimension of uint8")
    _check_array("starts", rows.starts, ("int64",), None, is_written=False)
    _check_array("ends", rows.ends, ("int64",), count, is_written=False)
    written = [rows.labels, rows.status, rows.at, *outputs]
    if rows.qid is not None:
        written.append(rows.qid)
        _check_array("qid", rows.qid, ("int64",), count)
    _check_array("labels", rows.labels, _LABELS, count)
    _check_array("status", rows.status, ("uint8",), count)
    _check_array("at", rows.at, ("int64",), count)
    if rows.base not in (0, 1):
        raise ValueError(f"base: expected 0 or 1, found {rows.base}")
    if rows.limit < 0:
        raise ValueError(f"limit: expected 0 or more, found {rows.limit}")
    read = [np.asarray(text), rows.starts, rows.ends, *([] if offsets is None else [offsets])]
    check_apart(written, read)


def _check_array(
    name: str,
    array: npt.NDArray[Any],
    dtypes: Sequence[str],
    count: int | None,
    is_written: bool = True,
) -> None:
    check_array(name, array, dtypes, (None,), is_written)
    if count is not None and len(array) != count:
        raise ValueError(f"{name}: expected {count} numbers, found {len(array)}")
