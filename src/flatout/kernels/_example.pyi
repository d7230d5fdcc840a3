# Parameters of type object take an object with the buffer protocol; offsets and present also None.
from collections.abc import Sequence

# (name, kind, width or -1, required, whether values are at most int32)
Feature = tuple[bytes, int, int, bool, bool]
# (name, kind, values, width or -1, offsets)
Column = tuple[bytes, int, object, int, object]

class Plan: ...  # a capsule

def crc32c(data: object, value: int, /) -> int: ...
def crc32c_ways(data: object, value: int, /) -> dict[str, int]: ...
def crc32c_blocks(data: object, block: int, out: object, /) -> None: ...
def scan(buffer: object, start: int, starts: object, ends: object, /) -> tuple[int, int, int]: ...
def plan(features: Sequence[Feature], /) -> Plan: ...
def measure(
    buffer: object,
    starts: object,
    ends: object,
    plan: Plan,
    lengths: object,
    status: object,
    at: object,
    check: bool,
    /,
) -> int: ...
def decode(
    buffer: object,
    starts: object,
    ends: object,
    plan: Plan,
    outputs: Sequence[object],
    offsets: Sequence[object],
    present: object,
    defaults: Sequence[float],
    status: object,
    at: object,
    check: bool,
    /,
) -> int: ...
def sizes(columns: tuple[Column, ...], rows: int, offsets: object, /) -> int: ...
def write(columns: tuple[Column, ...], rows: int, offsets: object, out: object, /) -> int: ...
