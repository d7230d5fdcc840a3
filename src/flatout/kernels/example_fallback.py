"""What `_example.c` does, in plain Python and numpy, slowly. For `example` alone."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from flatout.kernels.checks import (
    LARGEST,
    Fault,
    Numbers,
    Text,
    Wrong,
    check_apart,
    check_array,
    text_of,
)

# Name, number of the kind, values, width or -1, offsets or None.
Entry: TypeAlias = tuple[bytes, int, Any, int, Any]

_ALL_ONES = 0xFFFFFFFF
_HEADER, _FOOTER = 12, 4
_DTYPES = {"int64": ("int32", "int64"), "float": ("float32",), "bytes": ("uint8",)}
_KINDS = ("", "bytes", "float", "int64")
# Bytes of tags and lengths, and of values.
_SHORT, _LONG = 5, 10
_VARINT, _EIGHT_BYTES, _BYTES, _FOUR_BYTES = 0, 1, 2, 5


class Bad(Fault):
    """What is wrong with a record."""

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


# ---- checksum ----


def _make_table() -> list[int]:
    table = []
    for state in range(256):
        for _ in range(8):
            state = state >> 1 ^ (0x82F63B78 if state & 1 else 0)
        table.append(state)
    return table


_TABLE = _make_table()
_NP_TABLE = np.array(_TABLE, np.uint32)
# So many parts of the data are gone through side by side, a byte of each at a time.
_LANES = 4096
_PIECE = _LANES * 4096


def crc32c(data: Any, value: int = 0) -> int:
    """As `example.crc32c`."""
    text = text_of("data", data)
    state, at = ~value & _ALL_ONES, 0
    while len(text) - at >= 16 * _LANES:
        size = min(_PIECE, len(text) - at) // _LANES
        state = _lanes_state(state, text[at : at + size * _LANES].reshape(_LANES, size))
        at += size * _LANES
    for byte in text[at:].tobytes():
        state = _TABLE[(state ^ byte) & 255] ^ state >> 8
    return ~state & _ALL_ONES


def _lanes_state(state: int, lanes: Text) -> int:
    states = np.zeros(len(lanes), np.uint32)
    states[0] = state
    for column in np.ascontiguousarray(lanes.T):
        states = _NP_TABLE[(states ^ column) & 255] ^ states >> np.uint32(8)
    # What zeros make of each bit of a state: of one byte, then of as many as a lane has.
    bits = np.left_shift(np.uint32(1), np.arange(32, dtype=np.uint32))
    step, moves = _NP_TABLE[bits & 255] ^ bits >> np.uint32(8), bits
    size = lanes.shape[1]
    while size:
        if size & 1:
            moves = _moved(moves, step)
        step, size = _moved(step, step), size >> 1
    while len(states) > 1:
        states = _moved(states[0::2], moves) ^ states[1::2]
        moves = _moved(moves, moves)
    return int(states[0])


def _moved(states: npt.NDArray[np.uint32], moves: npt.NDArray[np.uint32]) -> Any:
    out = np.zeros_like(states)
    for bit in range(32):
        out ^= (states >> np.uint32(bit) & np.uint32(1)) * moves[bit]
    return out


def masked(crc: int) -> int:
    """As it stands in TFRecord files."""
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & _ALL_ONES


# ---- checks ----


def _check_offsets(name: str, offsets: Any, rows: int, room: int) -> None:
    if not isinstance(offsets, np.ndarray):
        raise TypeError(f"{name}: expected an array, found {type(offsets).__name__}")
    check_array(name, offsets, ("int64",), (rows + 1,), False)
    if offsets[0] < 0 or offsets[-1] > room or (offsets[1:] < offsets[:-1]).any():
        raise ValueError(f"{name}: expected numbers from 0 to {room} that do not decrease")


def _fitting(name: str, value: float, dtype: np.dtype[Any]) -> float:
    if dtype == np.float32:
        number = float(value)
        if not math.isfinite(number) or abs(number) <= LARGEST:
            return number
    elif not isinstance(value, float) or value.is_integer():
        limits = np.iinfo(dtype)
        if limits.min <= value <= limits.max:
            return int(value)
    raise ValueError(f"{name}: expected a number that fits into {dtype}, found {value}")


# ---- frames ----


def scan(buffer: Any, start: int, starts: Numbers, ends: Numbers) -> tuple[int, int, int]:
    """As `_example.scan`; the last number is an `End`."""
    text = text_of("buffer", buffer)
    if not 0 <= start <= len(text):
        raise ValueError(f"start: expected 0 to {len(text)}, found {start}")
    at, count = start, 0
    while at < len(text):
        left = len(text) - at
        if count == len(starts):
            return count, at, 1
        if left < _HEADER:
            return count, at, 2
        header = text[at : at + _HEADER].tobytes()
        if masked(crc32c(header[:8])) != int.from_bytes(header[8:], "little"):
            return count, at, 3
        length = int.from_bytes(header[:8], "little")
        if length > 2**63 - 1 - _HEADER - _FOOTER:
            return count, at, 4
        if length > left - _HEADER - _FOOTER:
            return count, at, 5
        starts[count], ends[count] = at + _HEADER, at + _HEADER + length
        at += _HEADER + length + _FOOTER
        count += 1
    return count, at, 0


def _check_frame(text: Text, start: int, stop: int) -> None:
    if start < _HEADER or len(text) - stop < _FOOTER:
        raise Wrong(Bad.OUTSIDE, start)
    header = text[start - _HEADER : start].tobytes()
    if masked(crc32c(header[:8])) != int.from_bytes(header[8:], "little"):
        raise Wrong(Bad.LENGTH_CRC, start - _HEADER)
    if int.from_bytes(header[:8], "little") != stop - start:
        raise Wrong(Bad.LENGTH_DIFFERS, start - _HEADER)
    footer = text[stop : stop + _FOOTER].tobytes()
    if masked(crc32c(text[start:stop])) != int.from_bytes(footer, "little"):
        raise Wrong(Bad.DATA_CRC, start)


# ---- messages ----


class _Field(NamedTuple):
    number: int
    wire: int
    at: int
    end: int
    value: int


def _varint(record: bytes, at: int, end: int, most: int) -> tuple[int, int]:
    value = 0
    for i in range(most):
        if at + i >= end:
            raise Wrong(Bad.TRUNCATED, at)
        byte = record[at + i]
        value |= (byte & 127) << 7 * i
        if byte < 128:
            return value & 2**64 - 1, at + i + 1
    raise Wrong(Bad.VARINT_TOO_LONG, at)


def _fields(record: bytes, at: int, end: int) -> Iterator[_Field]:
    while at < end:
        begin = at
        tag, at = _varint(record, at, end, _SHORT)
        number, wire, value = tag >> 3, tag & 7, 0
        if number == 0 or tag >= 2**32 or wire not in (_VARINT, _EIGHT_BYTES, _BYTES, _FOUR_BYTES):
            raise Wrong(Bad.TAG, begin)
        first = at
        if wire == _VARINT:
            value, at = _varint(record, at, end, _LONG)
        else:
            length = 8 if wire == _EIGHT_BYTES else 4
            if wire == _BYTES:
                length, at = _varint(record, at, end, _SHORT)
            if length > end - at:
                raise Wrong(Bad.TRUNCATED, first)
            first, at = at, at + length
        yield _Field(number, wire, first, at, value)


def _messages(record: bytes, at: int, end: int, number: int) -> Iterator[_Field]:
    return (f for f in _fields(record, at, end) if f.number == number and f.wire == _BYTES)


def _entries(record: bytes) -> dict[bytes, tuple[int, int]]:
    entries = {}
    for features in _messages(record, 0, len(record), 1):
        for entry in _messages(record, features.at, features.end, 1):
            name = b""
            for key in _messages(record, entry.at, entry.end, 1):
                name = record[key.at : key.end]
            entries[name] = (entry.at, entry.end)
    return entries


def _lists(record: bytes, entry: tuple[int, int]) -> list[_Field]:
    counting: list[_Field] = []
    for feature in _messages(record, *entry, 2):
        for field in _fields(record, feature.at, feature.end):
            if field.wire != _BYTES or field.number >= len(_KINDS):
                continue
            if counting and counting[-1].number != field.number:
                counting = []
            counting.append(field)
    return counting


class _Values:
    """The values of a feature in a row: integers, or the bytes of floats or of one value."""

    def __init__(self, kind: str, is_int32: bool) -> None:
        self.kind = kind
        self.is_int32 = is_int32
        self.ints: list[int] = []
        self.raw = bytearray()
        self.pieces = 0

    def add(self, record: bytes, field: _Field) -> None:
        if field.number != 1:
            return
        if self.kind == "int64" and field.wire == _VARINT:
            self._add_int(field.value, field.at)
        elif self.kind == "float" and field.wire == _FOUR_BYTES:
            self.raw += record[field.at : field.end]
        elif field.wire == _BYTES:
            self._add_packed(record, field.at, field.end)

    def _add_packed(self, record: bytes, at: int, end: int) -> None:
        if self.kind == "float" and (end - at) % 4:
            raise Wrong(Bad.TRUNCATED, at)
        self.pieces += 1
        if self.kind != "int64":
            self.raw += record[at:end]
            return
        while at < end:
            begin = at
            value, at = _varint(record, at, end, _LONG)
            self._add_int(value, begin)

    def _add_int(self, value: int, at: int) -> None:
        value -= (value >> 63) << 64
        if self.is_int32 and not -(2**31) <= value < 2**31:
            raise Wrong(Bad.INT32_OVERFLOW, at)
        self.ints.append(value)

    @property
    def array(self) -> npt.NDArray[Any]:
        if self.kind == "int64":
            return np.array(self.ints, np.int64)
        return np.frombuffer(self.raw, np.uint8 if self.kind == "bytes" else "<f4")


def _values(
    record: bytes, entry: tuple[int, int] | None, feature: Any, is_int32: bool, room: int | None
) -> npt.NDArray[Any] | None:
    lists = [] if entry is None else _lists(record, entry)
    if entry is None or not lists:
        if feature.required:
            raise Wrong(Bad.MISSING, 0)
        return None
    if _KINDS[lists[-1].number] != feature.kind:
        raise Wrong(Bad.WRONG_KIND, entry[0])
    values = _Values(feature.kind, is_int32)
    for item in lists:
        for field in _fields(record, item.at, item.end):
            values.add(record, field)
    if feature.kind == "bytes" and values.pieces > 1:
        raise Wrong(Bad.SEVERAL_VALUES, entry[0])
    array = values.array
    if room is not None and (
        len(array) > room or (feature.width is not None and len(array) < room)
    ):
        raise Wrong(Bad.WRONG_COUNT, entry[0])
    return array


# ---- rows ----


class _Rows:
    """What `measure` and `decode` have in common: records, and where their faults go."""

    def __init__(
        self, buffer: Any, starts: Numbers, ends: Numbers, status: Any, at: Numbers, check: bool
    ) -> None:
        self.text = text_of("buffer", buffer)
        self.starts, self.ends, self.status, self.at = starts, ends, status, at
        self.check = check
        rows = starts.size
        check_array("starts", starts, ("int64",), (rows,), False)
        check_array("ends", ends, ("int64",), (rows,), False)
        check_array("status", status, ("uint8",), (rows,), True)
        check_array("at", at, ("int64",), (rows,), True)

    def check_apart(self, written: list[Any], read: list[Any]) -> None:
        check_apart([self.status, self.at, *written], [self.text, self.starts, self.ends, *read])

    def run(self, value: Any, spoil: Any) -> int:
        """Call `one(row, record, entries)` for each record, and `spoil(row)` for bad ones."""
        bad = 0
        for row, (start, stop) in enumerate(
            zip(self.starts.tolist(), self.ends.tolist(), strict=True)
        ):
            base = start
            try:
                if not 0 <= start <= stop <= len(self.text):
                    raise Wrong(Bad.OUTSIDE, 0)
                if self.check:
                    base = 0
                    _check_frame(self.text, start, stop)
                    base = start
                record = self.text[start:stop].tobytes()
                value(row, record, _entries(record))
                self.status[row] = 0
            except Wrong as wrong:
                spoil(row)
                self.status[row], self.at[row] = wrong.bad, base + wrong.at
                bad += 1
        return bad


def measure(
    buffer: Any,
    starts: Numbers,
    ends: Numbers,
    features: Sequence[Any],
    lengths: Numbers,
    status: npt.NDArray[np.uint8],
    at: Numbers,
    check: bool,
) -> int:
    """As `example.measure`."""
    rows = _Rows(buffer, starts, ends, status, at, check)
    ragged = [feature for feature in features if feature.width is None]
    check_array("lengths", lengths, ("int64",), (len(ragged), len(starts)), True)
    rows.check_apart([lengths], [])

    def one(row: int, record: bytes, entries: dict[bytes, tuple[int, int]]) -> None:
        counts = []
        for feature in features:
            values = _values(
                record, entries.get(feature.name), feature, feature.bits == 32, feature.width
            )
            if feature.width is None:
                counts.append(0 if values is None else len(values))
        lengths[:, row] = counts

    def spoil(row: int) -> None:
        lengths[:, row] = 0

    return rows.run(one, spoil)


def decode(
    buffer: Any,
    starts: Numbers,
    ends: Numbers,
    features: Sequence[Any],
    outputs: Sequence[npt.NDArray[Any]],
    offsets: Sequence[Numbers | None],
    present: npt.NDArray[np.uint8] | None,
    defaults: Sequence[float],
    status: npt.NDArray[np.uint8],
    at: Numbers,
    check: bool,
) -> int:
    """As `example.decode`."""
    rows = _Rows(buffer, starts, ends, status, at, check)
    count = len(starts)
    if not len(features) == len(outputs) == len(offsets) == len(defaults):
        raise ValueError(f"expected outputs, offsets and defaults of {len(features)} features")
    fills = []
    for i, (feature, output) in enumerate(zip(features, outputs, strict=True)):
        check_array(f"outputs[{i}]", output, _DTYPES[feature.kind], None, True)
        _check_layout(i, feature, output, offsets[i], count)
        fills.append(_fitting(f"defaults[{i}]", defaults[i], output.dtype))
    if present is not None:
        check_array("present", present, ("uint8",), (count, len(features)), True)
    rows.check_apart(
        [*outputs, *([] if present is None else [present])],
        [offset for offset in offsets if offset is not None],
    )

    def places(i: int, row: int) -> npt.NDArray[Any]:
        own = offsets[i]
        return outputs[i][row].reshape(-1) if own is None else outputs[i][own[row] : own[row + 1]]

    def one(row: int, record: bytes, entries: dict[bytes, tuple[int, int]]) -> None:
        arrays = []
        for i, feature in enumerate(features):
            is_int32 = feature.bits == 32 or outputs[i].dtype == np.int32
            room = len(places(i, row))
            arrays.append(_values(record, entries.get(feature.name), feature, is_int32, room))
        for i, values in enumerate(arrays):
            own, size = places(i, row), 0 if values is None else len(values)
            if values is not None:
                own[:size] = values
            own[size:] = fills[i]
            if present is not None:
                present[row, i] = values is not None

    def spoil(row: int) -> None:
        for i in range(len(features)):
            places(i, row)[:] = 0
        if present is not None:
            present[row] = 0

    return rows.run(one, spoil)


def _check_layout(i: int, feature: Any, output: Any, offsets: Numbers | None, rows: int) -> None:
    if feature.width is None:
        if output.ndim != 1:
            raise ValueError(f"outputs[{i}]: expected one dimension, for it is ragged")
        _check_offsets(f"offsets[{i}]", offsets, rows, len(output))
        return
    if offsets is not None:
        raise ValueError(f"offsets[{i}]: expected None, for it is not ragged")
    if output.ndim == 0 or len(output) != rows or output.size != rows * feature.width:
        raise ValueError(
            f"outputs[{i}]: expected shape ({rows}, {feature.width}), found {output.shape}"
        )


# ---- writing ----


def sizes(entries: Sequence[Entry], rows: int, offsets: Numbers) -> None:
    """As `_example.sizes`."""
    for i, (_, _, values, width, own) in enumerate(entries):
        if own is not None:
            _check_offsets(f"offsets[{i}]", own, rows, values.size)
        elif values.size != rows * width:
            raise ValueError(f"columns[{i}]: expected {rows} rows of {width} values")
    check_array("offsets", offsets, ("int64",), (rows + 1,), True)
    offsets[0] = 0
    for row in range(rows):
        size = len(_record(entries, row))
        if size >= 2**31:
            raise ValueError(f"row {row}: a record may have at most 2^31 - 1 bytes")
        offsets[row + 1] = offsets[row] + _HEADER + size + _FOOTER


def write(entries: Sequence[Entry], rows: int, offsets: Numbers, out: Text) -> None:
    """As `_example.write`."""
    for row in range(rows):
        record = _record(entries, row)
        header = len(record).to_bytes(8, "little")
        parts = [header, _footer(header), record, _footer(record)]
        out[offsets[row] : offsets[row + 1]] = np.frombuffer(b"".join(parts), np.uint8)


def _footer(data: bytes) -> bytes:
    return masked(crc32c(data)).to_bytes(4, "little")


def _record(entries: Sequence[Entry], row: int) -> bytes:
    features = b""
    for name, kind, values, width, own in entries:
        flat = values.reshape(-1)
        first, stop = (row * width, (row + 1) * width) if own is None else own[row : row + 2]
        content = flat[first:stop]
        if _KINDS[kind] == "int64":
            packed = b"".join(_varint_bytes(value & 2**64 - 1) for value in content.tolist())
        else:
            packed = content.astype(content.dtype.newbyteorder("<"), copy=False).tobytes()
        is_empty = len(content) == 0 and _KINDS[kind] != "bytes"
        feature = _message(kind, b"" if is_empty else _message(1, packed))
        features += _message(1, _message(1, name) + _message(2, feature))
    return _message(1, features)


def _message(number: int, data: bytes) -> bytes:
    return bytes([number << 3 | _BYTES]) + _varint_bytes(len(data)) + data


def _varint_bytes(value: int) -> bytes:
    out = bytearray()
    while value >= 128:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)
