"""TFRecord files of tf.train.Example messages: finding, decoding and writing records.

A file is one frame after the other: the length of a record (uint64), its checksum, the record, its
checksum. Checksums are CRC-32C, masked as in TensorFlow's `record_writer.h`. A record is a message
of Protocol Buffers (https://protobuf.dev/programming-guides/encoding) as in `example.proto` and
`feature.proto`: a map from names to lists of integers, floats or bytes.

The C extension and its fallback in plain Python give the same bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from flatout.kernels import absent, example_fallback
from flatout.kernels.checks import Numbers
from flatout.kernels.example_fallback import Bad as Bad

try:
    from flatout.kernels import _example as _c
except ImportError:
    _c = None  # type: ignore[assignment]

_use_c = _c is not None and absent.WANTED

# Rows of equal length, or values and where each row begins among them (one more than rows).
Values: TypeAlias = npt.NDArray[Any] | tuple[npt.NDArray[Any], Numbers]

# Numbers of the fields of the message Feature.
_KINDS = {"bytes": 1, "float": 2, "int64": 3}
_KIND_OF = {np.dtype(np.uint8): 1, np.dtype(np.float32): 2, np.dtype(np.int64): 3}


class End(IntEnum):
    """How a scan ended."""

    WHOLE = 0
    MOST = 1
    TRUNCATED_HEADER = 2
    LENGTH_CRC = 3
    LENGTH_TOO_LARGE = 4
    TRUNCATED_DATA = 5


class Scan(NamedTuple):
    """Records found in a buffer.

    Attributes:
        starts: first byte of each record, behind length and checksum; int64 of shape (records,).
        ends: one after the last byte, where the record's checksum stands.
        consumed: where the next frame begins: the end of the buffer, or of what is whole in it.
        end: how the scan ended.
        problem: what is wrong at `consumed`, expected and found; "" where nothing is, or more bytes
            may follow.
    """

    starts: Numbers
    ends: Numbers
    consumed: int
    end: End
    problem: str


class Feature(NamedTuple):
    """A feature to look for.

    Attributes:
        name: key in the map.
        kind: what kind of list it is.
        width: values in each row; of the kind "bytes", bytes of the one value. None: rows differ.
        required: whether a record without it is bad; otherwise its default takes its place.
        bits: with 32, integers that do not fit into int32 are bad, also where they are measured.
    """

    name: bytes
    kind: Literal["int64", "float", "bytes"]
    width: int | None
    required: bool
    bits: Literal[32, 64] = 64


class Plan:
    """Features, prepared to be looked for. Several threads may use it at once; it can be pickled.

    Attributes:
        features: in the order of the outputs.
    """

    def __init__(self, features: Sequence[Feature]) -> None:
        self.features = tuple(features)
        _check_features(self.features)
        self.compiled: Any = None
        if _c is not None:
            self.compiled = _c.plan(
                [
                    (f.name, _KINDS[f.kind], _width(f), f.required, f.bits == 32)
                    for f in self.features
                ]
            )

    def __reduce__(self) -> tuple[Any, ...]:
        return Plan, (self.features,)


def _width(feature: Feature) -> int:
    return -1 if feature.width is None else feature.width


def _check_features(features: Sequence[Feature]) -> None:
    if not features:
        raise ValueError("features: expected at least one")
    if len({feature.name for feature in features}) < len(features):
        raise ValueError("features: expected different names, found the same one twice")
    for feature in features:
        if feature.kind not in _KINDS or feature.bits not in (32, 64):
            raise ValueError(
                f"feature {feature.name!r}: expected the kind int64, float or bytes, and 32 or 64 "
                f"bits; found {feature.kind!r} and {feature.bits}"
            )
        if feature.width is not None and not 1 <= feature.width < 2**31:
            raise ValueError(
                f"feature {feature.name!r}: expected a width of 1 to 2^31 - 1, or None; found "
                f"{feature.width}"
            )


def available() -> bool:
    """Whether the C extension runs; otherwise its fallback does."""
    return _use_c


def crc32c(data: Any, value: int = 0) -> int:
    """The CRC-32C (Castagnoli) of bytes.

    Args:
        data: C-contiguous memory with the buffer protocol.
        value: of what stands before, to go on from there.
    """
    absent.warn_without(_c)
    return (_c.crc32c if _use_c else example_fallback.crc32c)(data, value)


def crc32c_blocks(data: Any, block: int) -> npt.NDArray[np.int64]:
    """The CRC-32C of each block of bytes.

    Args:
        data: C-contiguous memory with the buffer protocol.
        block: bytes of each; the last may be shorter.

    Returns:
        int64 of shape (blocks,).

    Raises:
        ValueError: `block` is less than 1.
    """
    absent.warn_without(_c)
    if block < 1:
        raise ValueError("block: expected at least 1 byte")
    view = memoryview(data)
    text = view.cast("B") if view.nbytes else b""
    out = np.empty(-(-len(text) // block), np.int64)
    if _use_c:
        _c.crc32c_blocks(text, block, out)
    else:
        for at in range(len(out)):
            out[at] = example_fallback.crc32c(text[at * block : (at + 1) * block])
    return out


def masked_crc32c(data: Any) -> int:
    """The CRC-32C of bytes, rotated and moved, as it stands in TFRecord files."""
    return example_fallback.masked(crc32c(data))


def scan(
    buffer: Any,
    start: int = 0,
    *,
    final: bool = True,
    most: int | None = None,
    at_once: int = 1 << 16,
) -> Scan:
    """Find the records of a TFRecord file by their frames, and compare each length's checksum."""
    absent.warn_without(_c)
    columns: list[tuple[Numbers, Numbers]] = []
    at, total, end = start, 0, End.MOST
    while end == End.MOST and (most is None or total < most):
        room = at_once if most is None else min(at_once, most - total)
        starts, ends = np.empty(room, np.int64), np.empty(room, np.int64)
        count, at, code = (_c.scan if _use_c else example_fallback.scan)(buffer, at, starts, ends)
        end = End(code)
        columns.append((starts[:count], ends[:count]))
        total += count
    problem = _problem(memoryview(buffer).cast("B"), at, end, final) if end > End.MOST else ""
    pairs = zip(*columns, strict=True) if columns else ([], [])
    starts, ends = (np.concatenate(parts) if parts else np.empty(0, np.int64) for parts in pairs)
    return Scan(starts, ends, at, end, problem)


def _problem(data: memoryview, at: int, end: End, final: bool) -> str:
    left = len(data) - at
    if end == End.TRUNCATED_HEADER:
        missing = f"expected a length and its checksum, 12 bytes; found the end after {left}"
        return missing if final else ""
    length = int.from_bytes(data[at : at + 8], "little")
    if end == End.LENGTH_CRC:
        expected = masked_crc32c(data[at : at + 8])
        crc = int.from_bytes(data[at + 8 : at + 12], "little")
        return f"expected the checksum {expected:#010x} of the record's length, found {crc:#010x}"
    if end == End.LENGTH_TOO_LARGE:
        return f"expected a length below 2^63, found {length:,}"
    missing = (
        f"expected a record of {length:,} bytes and its checksum, 4 bytes; found the end after "
        f"{left - 12:,}"
    )
    return missing if final else ""


def plan(features: Sequence[Feature]) -> Plan:
    """Prepare to look for features."""
    return Plan(features)


def measure(
    buffer: Any,
    starts: Numbers,
    ends: Numbers,
    spec: Plan,
    *,
    lengths: Numbers,
    status: npt.NDArray[np.uint8],
    at: Numbers,
    check: bool = True,
) -> int:
    """Count the values of ragged features, and find bad records.

    Args:
        buffer: as for `scan`.
        starts: first byte of each record, int64 of shape (rows,).
        ends: one after the last byte.
        spec: made by `plan`.
        lengths: int64 of shape (ragged features, rows) to write into: values in each row; of the
            kind "bytes", bytes of the one value. 0 where a feature is missing or the record bad.
        status: uint8 of shape (rows,) to write into: 0 for a good record, else a `Bad`.
        at: int64 of shape (rows,): where in the buffer a bad record goes wrong. Places of good
            records stay as they are.
        check: compare length and both checksums of the frame around each record, which then has to
            be in the buffer. False reads nothing but the record.

    Returns:
        How many records are bad.

    Raises:
        ValueError: an array has another dtype, shape or memory layout, or arrays share memory.
            Nothing is written.
    """
    absent.warn_without(_c)
    if _use_c:
        return _c.measure(buffer, starts, ends, spec.compiled, lengths, status, at, check)
    return example_fallback.measure(buffer, starts, ends, spec.features, lengths, status, at, check)


def decode(
    buffer: Any,
    starts: Numbers,
    ends: Numbers,
    spec: Plan,
    *,
    outputs: Sequence[npt.NDArray[Any]],
    offsets: Sequence[Numbers | None],
    defaults: Sequence[float],
    status: npt.NDArray[np.uint8],
    at: Numbers,
    present: npt.NDArray[np.uint8] | None = None,
    check: bool = True,
) -> int:
    """Decode records into arrays.

    Entries of the map may come in any order, and the last of several with the same key counts;
    lists may be packed or not; fields that are unknown are skipped, and features that are not in
    `spec` without a look into them. A feature that is there without a list is missing.
    """
    absent.warn_without(_c)
    results = (outputs, offsets, present, defaults, status, at, check)
    if _use_c:
        return _c.decode(buffer, starts, ends, spec.compiled, *results)
    return example_fallback.decode(buffer, starts, ends, spec.features, *results)


def encode(columns: Mapping[str, Values]) -> tuple[npt.NDArray[np.uint8], Numbers]:
    """Write rows as the frames of a TFRecord file, with both checksums.

    Map entries come in the order of the columns and lists are packed, so that the same rows always
    give the same bytes.
    """
    absent.warn_without(_c)
    if not columns:
        raise ValueError("columns: expected at least one")
    rows = {_rows(values) for values in columns.values()}
    if len(rows) > 1:
        raise ValueError(f"columns: expected equally many rows, found {sorted(rows)}")
    count = rows.pop()
    if count < 0:
        raise ValueError("columns: expected offsets of one number or more, found none")
    entries = tuple(_entry(name, values, count) for name, values in columns.items())
    offsets = np.empty(count + 1, np.int64)
    (_c.sizes if _use_c else example_fallback.sizes)(entries, count, offsets)
    out = np.empty(int(offsets[-1]), np.uint8)
    (_c.write if _use_c else example_fallback.write)(entries, count, offsets, out)
    return out, offsets


def _rows(values: Values) -> int:
    return len(values[1]) - 1 if isinstance(values, tuple) else len(values)


def _entry(name: str, column: Values, rows: int) -> tuple[bytes, int, Any, int, Any]:
    values, offsets = column if isinstance(column, tuple) else (column, None)
    kind = _KIND_OF.get(values.dtype)
    if kind is None or not values.flags.c_contiguous:
        raise ValueError(
            f"column {name!r}: expected C-contiguous int64, float32 or uint8, found {values.dtype}"
        )
    if offsets is not None:
        return name.encode(), kind, values, -1, offsets
    return name.encode(), kind, values, int(np.prod(values.shape[1:], dtype=np.int64)), None
