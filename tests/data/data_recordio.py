"""RecordIO files, as MXNet writes them."""

import struct
from collections.abc import Iterable, Iterator
from typing import IO

_MAGIC = 0xCED7230A
_MAGIC_BYTES = struct.pack("<I", _MAGIC)
_HEAD = struct.Struct("<II")
_LENGTH_BITS = 29
_WHOLE, _FIRST, _MIDDLE, _LAST = range(4)


def write_recordio(file: IO[bytes], records: Iterable[bytes]) -> None:
    for record in records:
        cuts = list(_magic_places(record))
        flag = _FIRST if cuts else _WHOLE
        start = 0
        for cut in cuts:
            _write_part(file, record[start:cut], flag)
            start, flag = cut + 4, _MIDDLE
        _write_part(file, record[start:], _LAST if cuts else _WHOLE)


def _magic_places(record: bytes) -> Iterator[int]:
    """Where a reader that searches for records would take data for a head."""
    at = record.find(_MAGIC_BYTES)
    while at >= 0:
        if at % 4 == 0:
            yield at
        at = record.find(_MAGIC_BYTES, at + 1)


def _write_part(file: IO[bytes], part: bytes, flag: int) -> None:
    file.write(_HEAD.pack(_MAGIC, flag << _LENGTH_BITS | len(part)))
    file.write(part)
    file.write(bytes(-len(part) % 4))
