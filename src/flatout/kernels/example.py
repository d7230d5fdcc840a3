"""STOPGAP by the lead until the kernel's author replaces this file: overwrite it freely."""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np

_TABLE = []
for _i in range(256):
    _c = _i
    for _ in range(8):
        _c = (_c >> 1) ^ (0x82F63B78 if _c & 1 else 0)
    _TABLE.append(_c)


class Bad(IntEnum):
    LENGTH_CRC = 1
    DATA_CRC = 2
    OUTSIDE = 3
    TRUNCATED = 4
    VARINT = 5
    WIRE_TYPE = 6
    KIND = 7
    MISSING = 8
    COUNT = 9
    OVERFLOW = 10
    SEVERAL = 11

    @property
    def words(self) -> str:
        return f"expected a good Example, found: {self.name.lower()}"


def crc32c(data: Any, value: int = 0) -> int:
    crc = ~value & 0xFFFFFFFF
    table = _TABLE
    for byte in bytes(
        memoryview(
            np.ascontiguousarray(np.frombuffer(data, np.uint8))
            if not isinstance(data, np.ndarray)
            else np.ascontiguousarray(data)
        ).cast("B")
    ):
        crc = (crc >> 8) ^ table[(crc ^ byte) & 255]
    return ~crc & 0xFFFFFFFF


def masked_crc32c(data: Any) -> int:
    crc = crc32c(data)
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


class Scan(NamedTuple):
    starts: Any
    ends: Any
    consumed: int
    problem: str


def scan(buffer: Any, start: int = 0, *, final: bool = True) -> Scan:
    data = bytes(memoryview(buffer))
    at, starts, ends, problem = start, [], [], ""
    while at < len(data):
        if len(data) - at < 12:
            problem = "truncated header" if final else ""
            break
        (length,) = struct.unpack_from("<Q", data, at)
        if masked_crc32c(data[at : at + 8]) != struct.unpack_from("<I", data, at + 8)[0]:
            problem = "bad length CRC"
            break
        if length + 16 > len(data) - at:
            problem = "truncated data" if final or length > 2**40 else ""
            break
        starts.append(at + 12)
        ends.append(at + 12 + length)
        at += 16 + length
    return Scan(np.array(starts, np.int64), np.array(ends, np.int64), at, problem)


class Feature(NamedTuple):
    name: bytes
    kind: str
    width: int | None
    required: bool


def plan(features: Any) -> Any:
    return tuple(features)


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at


def _fields(data: bytes) -> Any:
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        if tag & 7 == 0:
            value, at = _varint(data, at)
            yield tag >> 3, 0, value
        elif tag & 7 == 2:
            size, at = _varint(data, at)
            yield tag >> 3, 2, data[at : at + size]
            at += size
        else:
            size = 8 if tag & 7 == 1 else 4
            yield tag >> 3, tag & 7, data[at : at + size]
            at += size


def _row(data: bytes) -> dict[bytes, tuple[str, Any]]:
    found = {}
    for n, _, features in _fields(data):
        if n != 1:
            continue
        for k, _, entry in _fields(features):
            name, value = b"", b""
            for f, _, part in _fields(entry):
                if f == 1:
                    name = part
                elif f == 2:
                    value = part
            kind, values = "", []
            for f, _, lst in _fields(value):
                kind = {1: "bytes", 2: "float", 3: "int64"}[f]
                for g, wire, part in _fields(lst):
                    if kind == "bytes":
                        values.append(part)
                    elif kind == "float":
                        values.extend(struct.unpack(f"<{len(part) // 4}f", part))
                    elif wire == 0:
                        values.append(part - (1 << 64) if part >> 63 else part)
                    else:
                        at = 0
                        while at < len(part):
                            v, at = _varint(part, at)
                            values.append(v - (1 << 64) if v >> 63 else v)
            found[name] = (kind, values[0] if kind == "bytes" and values else values)
    return found


def _rows(buffer: Any, starts: Any, ends: Any, status: Any, at: Any, check: bool) -> Any:
    data = memoryview(buffer).cast("B")
    for i, (s, e) in enumerate(zip(starts.tolist(), ends.tolist())):
        raw = bytes(data[s:e])
        status[i] = 0
        if check and masked_crc32c(raw) != struct.unpack_from("<I", data, e)[0]:
            status[i], at[i] = Bad.DATA_CRC, s
            yield i, {}
            continue
        try:
            yield i, _row(raw)
        except Exception:
            status[i], at[i] = Bad.TRUNCATED, s
            yield i, {}


def measure(buffer, starts, ends, spec, *, lengths, status, at, check=True) -> int:
    ragged = [f for f in spec if f.width is None]
    for i, row in _rows(buffer, starts, ends, status, at, check):
        for k, f in enumerate(ragged):
            lengths[k][i] = len(row[f.name][1]) if f.name in row else 0
    return int((status != 0).sum())


def decode(
    buffer, starts, ends, spec, *, outputs, offsets, defaults, status, at, present=None, check=True
) -> int:
    for i, row in _rows(buffer, starts, ends, status, at, check):
        for f, out, off, default in zip(spec, outputs, offsets, defaults):
            place = out[i] if off is None else out[off[i] : off[i + 1]]
            if status[i]:
                place[:] = 0
                continue
            if f.name not in row:
                if f.required:
                    status[i], at[i] = Bad.MISSING, ends[i]
                place[:] = default
                continue
            kind, values = row[f.name]
            if kind != f.kind and len(values):
                status[i], at[i] = Bad.KIND, starts[i]
                continue
            if len(values) != len(place):
                status[i], at[i] = Bad.COUNT, starts[i]
                continue
            place[:] = np.frombuffer(values, np.uint8) if kind == "bytes" else values
    return int((status != 0).sum())


def _v(value: int) -> bytes:
    value &= (1 << 64) - 1
    out = b""
    while value >= 128:
        out += bytes([value & 127 | 128])
        value >>= 7
    return out + bytes([value])


def _ld(field: int, data: bytes) -> bytes:
    return _v(field << 3 | 2) + _v(len(data)) + data


def encode(columns: Any) -> Any:
    out, offsets = [], [0]
    first = next(iter(columns.values()))
    rows = len(first[1]) - 1 if isinstance(first, tuple) else len(first)
    for i in range(rows):
        entries = b""
        for name, c in columns.items():
            v = (
                c[0][c[1][i] : c[1][i + 1]]
                if isinstance(c, tuple)
                else np.atleast_1d(c[i]).reshape(-1)
            )
            if v.dtype == np.uint8:
                lst = _ld(1, _ld(1, v.tobytes()))
            elif v.dtype == np.float32:
                lst = _ld(2, _ld(1, v.tobytes()))
            else:
                lst = _ld(3, _ld(1, b"".join(_v(int(x)) for x in v)))
            entries += _ld(1, _ld(1, name.encode()) + _ld(2, lst))
        data = _ld(1, entries)
        head = struct.pack("<Q", len(data))
        frame = (
            head
            + struct.pack("<I", masked_crc32c(head))
            + data
            + struct.pack("<I", masked_crc32c(data))
        )
        out.append(frame)
        offsets.append(offsets[-1] + len(frame))
    return b"".join(out), np.array(offsets, np.int64)
