"""TFRecord files of tf.train.Example messages: finding, decoding and writing records.

A file is one frame after the other: the length of a record (uint64), its checksum, the record, its
checksum. Checksums are CRC-32C, masked as in TensorFlow's `record_writer.h`. A record is a message
of Protocol Buffers (https://protobuf.dev/programming-guides/encoding) as in `example.proto` and
`feature.proto`: a map from names to lists of integers, floats or bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from flatout.kernels import missing_extension
from flatout.kernels.checks import Fault, Numbers

_c = missing_extension.required("_example")


# Rows of equal length, or a pair of values and the index at which each row begins (rows + 1).
Values: TypeAlias = npt.NDArray[Any] | tuple[npt.NDArray[Any], Numbers]

# Numbers of the fields of the message Feature.
_KINDS = {"bytes": 1, "float": 2, "int64": 3}
# Maximum number of records that are found by one call of the extension.
_AT_ONCE = 1 << 16
_KIND_OF = {np.dtype(np.uint8): 1, np.dtype(np.float32): 2, np.dtype(np.int64): 3}


class Bad(Fault):
    OUTSIDE = 1, "expected a record inside the buffer, found a byte range that is not"
    LENGTH_CRC = 2, "expected the checksum of the record's length, found another one"
    LENGTH_DIFFERS = 3, "expected a record as long as its index says, found another length"
    DATA_CRC = 4, "expected the checksum of the record, found another one"
    TRUNCATED = 5, "expected a field that ends within its message, found one that does not"
    TAG = 6, "expected the tag of a field, found a group, a reserved type or the number 0"
    VARINT_TOO_LONG = 7, "expected a varint of at most 10 bytes, 5 in tags and lengths; found more"
    WRONG_KIND = 8, "expected a feature of the kind in the schema, found a list of another kind"
    MISSING = 9, "expected a feature that has no default, found a record without it"
    WRONG_COUNT = 10, "expected as many values as in the schema, found more or fewer"
    INT32_OVERFLOW = 11, "expected an integer that fits into int32, found a larger one"
    SEVERAL_VALUES = 12, "expected one value of bytes, found several"


class End(IntEnum):
    WHOLE = 0
    FULL = 1
    TRUNCATED_HEADER = 2
    LENGTH_CRC = 3
    LENGTH_TOO_LARGE = 4
    TRUNCATED_DATA = 5


class Scan(NamedTuple):
    """Records found in a buffer.

    Attributes:
        starts: first byte of each record, after length and checksum; int64 of shape (records,).
        ends: one after the last byte, at which the record's checksum is.
        consumed: begin of the next frame: the end of the buffer, or of the whole frames in it.
        end: the reason why the scan ended.
        problem: the fault at `consumed`, expected and found; "" if there is none, or more bytes may
            follow.
    """

    starts: Numbers
    ends: Numbers
    consumed: int
    end: End
    problem: str


class Feature(NamedTuple):
    """A feature to read.

    Attributes:
        name: key in the map.
        kind: kind of the list.
        width: values in each row; for the kind "bytes", bytes of the one value. None: rows differ.
        required: whether a record without it is bad; otherwise its default replaces it.
    """

    name: bytes
    kind: Literal["int64", "float", "bytes"]
    width: int | None
    required: bool


class Plan:
    """Features, compiled for the extension. Several threads may use it at once; it can be pickled.

    Attributes:
        features: in the order of the outputs.
    """

    def __init__(self, features: Sequence[Feature]) -> None:
        self.features = tuple(features)
        self.compiled = _c.plan(
            [(f.name, _KINDS[f.kind], _width(f), f.required) for f in self.features]
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return Plan, (self.features,)


def _width(feature: Feature) -> int:
    return -1 if feature.width is None else feature.width


def crc32c(data: Any, value: int = 0) -> int:
    """Return the CRC-32C (Castagnoli) of bytes.

    Args:
        data: C-contiguous memory with the buffer protocol.
        value: the CRC-32C of preceding bytes, to continue from.
    """
    return int(_c.crc32c(data, value))


def crc32c_blocks(data: Any, block: int) -> npt.NDArray[np.int64]:
    """Return the CRC-32C of each block of bytes.

    Args:
        data: C-contiguous memory with the buffer protocol.
        block: bytes of each block; the last may be shorter.

    Returns:
        int64 of shape (blocks,).

    Raises:
        ValueError: `block` is less than 1.
    """
    if block < 1:
        raise ValueError("block: expected at least 1 byte")
    view = memoryview(data)
    text = view.cast("B") if view.nbytes else b""
    out = np.empty(-(-len(text) // block), np.int64)
    _c.crc32c_blocks(text, block, out)
    return out


def masked_crc32c(data: Any) -> int:
    """Return the CRC-32C of bytes, rotated and shifted, as in TFRecord files."""
    crc = crc32c(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def scan(buffer: Any, *, final: bool = True) -> Scan:
    """Find the records of a TFRecord file by their frames, and check each length's checksum.

    Args:
        buffer: C-contiguous memory with the buffer protocol.
        final: whether no bytes follow those of the buffer.
    """
    columns: list[tuple[Numbers, Numbers]] = []
    at, end = 0, End.FULL
    while end == End.FULL:
        starts, ends = np.empty(_AT_ONCE, np.int64), np.empty(_AT_ONCE, np.int64)
        count, at, code = _c.scan(buffer, at, starts, ends)
        end = End(code)
        columns.append((starts[:count], ends[:count]))
    problem = _problem(memoryview(buffer).cast("B"), at, end, final) if end > End.FULL else ""
    starts, ends = (np.concatenate(parts) for parts in zip(*columns, strict=True))
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
    """Count the values of ragged features, and return the number of bad records (see `Fault`).

    Args:
        spec: the features to count.
        lengths: int64 of shape (ragged features, rows) to write into: values in each row; for the
            kind "bytes", bytes of the one value. 0 if a feature is missing or the record bad.
        check: whether to check length and both checksums of the frame around each record, which
            then must be in the buffer. False reads only the record.

    Raises:
        ValueError: an array has another dtype, shape or memory layout, or arrays share memory.
            Nothing is written.
    """
    return int(_c.measure(buffer, starts, ends, spec.compiled, lengths, status, at, check))


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
    check: bool = True,
) -> int:
    """Decode records into arrays.

    Entries of the map may come in any order, and the last of several with the same key counts.
    Lists may be packed or not. Unknown fields are skipped, and so are features that are not in
    `spec`. A feature without a list counts as missing.
    """
    results = (outputs, offsets, defaults, status, at, check)
    return int(_c.decode(buffer, starts, ends, spec.compiled, *results))


def encode(columns: Mapping[str, Values]) -> tuple[npt.NDArray[np.uint8], Numbers]:
    """Write rows as the frames of a TFRecord file, with both checksums.

    Map entries have the order of the columns and lists are packed, so that the same rows always
    result in the same bytes.
    """
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
    _c.sizes(entries, count, offsets)
    out = np.empty(int(offsets[-1]), np.uint8)
    _c.write(entries, count, offsets, out)
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
