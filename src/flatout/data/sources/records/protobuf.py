"""Fields of Protocol Buffers: https://protobuf.dev/programming-guides/encoding."""

from __future__ import annotations

from collections.abc import Iterator


class WireError(ValueError):
    """An error in a message."""


def fields(data: int | bytes) -> Iterator[tuple[int, int | bytes]]:
    data, at = message(data), 0
    while at < len(data):
        tag, at = _varint(data, at)
        wire = tag & 7
        if wire == 0:
            value, at = _varint(data, at)
            yield tag >> 3, value
            continue
        if wire == 2:
            size, at = _varint(data, at)
        elif wire in (1, 5):
            size = 8 if wire == 1 else 4
        else:
            raise WireError(f"wire type {wire}")
        if size > len(data) - at:
            raise WireError(f"a field wants {size:,} bytes, and {len(data) - at:,} are left")
        yield tag >> 3, data[at : at + size]
        at += size


def message(content: int | bytes) -> bytes:
    """Return the bytes of a field that holds text, bytes or a message."""
    if isinstance(content, int):
        raise WireError("expected a message, found a number")
    return content


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while at < len(data):
        byte = data[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value & (1 << 64) - 1, at
        if shift > 63:
            raise WireError("a varint of more than ten bytes")
    raise WireError("it ends within a number")
