"""Cuts a stream of bytes into records, in reused memory; and RecordIO's framing.

RecordIO (dmlc-core, `recordio.h`): a magic number, a length, the data, zeros up to a multiple of
four. The three highest bits of the length state whether it is a whole record or a part of one. Data
with the magic number at a multiple of four are split there, and the number itself is left out.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from flatout.data.reading.block import Numbers
from flatout.data.reading.decoder import Bytes, Split
from flatout.data.sources.pipes.pipe import Pipe
from flatout.errors import DataError

# Default for the maximum number of bytes of a record.
LONGEST_RECORD = 64 << 20

# Magic number at the start of each RecordIO part.
_MAGIC = 0xCED7230A
_MAGIC_BYTES = struct.pack("<I", _MAGIC)
_HEAD = struct.Struct("<II")
_LENGTH_BITS = 29
_MOST = (1 << _LENGTH_BITS) - 1
# Flags of a RecordIO part: a whole record, or the first, a middle or the last part of one.
_WHOLE, _FIRST, _MIDDLE, _LAST = range(4)
# Maximum bytes of a record's framing, which do not count toward the record's size.
_FRAMING = 1 << 12


class Piece(NamedTuple):
    """Whole records of a stream.

    Attributes:
        buffer: holds the records until the next piece is read.
        starts: first byte of each record in the buffer, int64.
        ends: byte after each record.
        offset: number of bytes of the stream before the buffer.
        lines: number of newlines of the stream before the buffer, if it is text.
    """

    buffer: Bytes
    starts: Numbers
    ends: Numbers
    offset: int
    lines: int

    def where(self, name: str, byte: int, text: bool) -> str:
        """Return file and line, or file and byte, of a byte of the buffer."""
        place = f"byte {self.offset + byte:,}"
        if not text:
            return f"{name}: {place}"
        line = self.lines + int(np.count_nonzero(self.buffer[:byte] == 10)) + 1
        return f"{name}:{line} ({place})"


def pieces(
    pipe: Pipe,
    split: Callable[[Bytes, bool], Split],
    *,
    text: bool,
    longest: int = LONGEST_RECORD,
    room_bytes: int = 1 << 20,
) -> Iterator[Piece]:
    """Yield the records of a pipe as they arrive, in pieces that fit into memory."""
    buffer = np.empty(2 * room_bytes, np.uint8)
    held = offset = lines = 0
    while True:
        # Read as many bytes as are held already, so that a long record is not searched again and
        # again.
        room = min(max(room_bytes, held), longest + _FRAMING + room_bytes - held)
        if len(buffer) < held + room:
            larger = np.empty(min(2 * (held + room), longest + _FRAMING + room_bytes), np.uint8)
            larger[:held] = buffer[:held]
            buffer = larger
        came = pipe.read_into(buffer.data[held : held + room])
        if came == 0:
            break
        held += came
        result = split(buffer[:held], False)
        piece = Piece(buffer[:held], result.starts, result.ends, offset, lines)
        _check_sizes(piece, pipe.name, text, longest)
        if len(piece.starts):
            yield piece
        if result.problem:
            raise DataError(result.problem, where=piece.where(pipe.name, result.consumed, text))
        if held - result.consumed > longest + _FRAMING:
            raise _too_long(piece.where(pipe.name, result.consumed, text), longest)
        if text:
            lines += int(np.count_nonzero(buffer[: result.consumed] == 10))
        offset += result.consumed
        rest = held - result.consumed
        buffer[:rest] = buffer[result.consumed : held]
        held = rest
    if held:
        result = split(buffer[:held], True)
        piece = Piece(buffer[:held], result.starts, result.ends, offset, lines)
        raise _cut_off(piece, result.problem, pipe.name, text)


def _check_sizes(piece: Piece, name: str, text: bool, longest: int) -> None:
    sizes = piece.ends - piece.starts
    if len(sizes) and int(sizes.max()) > longest:
        first = int(piece.starts[np.argmax(sizes > longest)])
        raise _too_long(piece.where(name, first, text), longest)


def _too_long(where: str, longest: int) -> DataError:
    return DataError(
        f"expected a record of at most {longest:,} bytes, found a longer one",
        where=where,
        do="check that the format is the right one, or raise max_record_bytes",
    )


def _cut_off(piece: Piece, problem: str, name: str, text: bool) -> DataError:
    problem = problem or "expected a newline at the end of the row"
    return DataError(
        f"the stream ends within a record, of which {len(piece.buffer):,} bytes came: {problem}",
        where=piece.where(name, 0, text),
        do="look why the writer ended early"
        + (", or end the last line of the text with a newline" if text else ""),
    )


def split_recordio(buffer: Bytes, final: bool) -> Split:
    """Find the records of RecordIO, and join the parts of a record in the buffer.

    As the buffer changes, whole records must be searched only once.
    """
    starts: list[int] = []
    ends: list[int] = []
    parts: list[tuple[int, int]] = []
    view, size = buffer.data, len(buffer)
    at = begin = expected = 0
    problem = ""
    while at < size:
        expected = at + _HEAD.size
        if expected > size:
            break
        magic, word = _HEAD.unpack_from(view, at)
        problem = _head_problem(magic, word >> _LENGTH_BITS, bool(parts))
        if problem:
            return Split(_array(starts), _array(ends), at, problem)
        start, end = expected, expected + (word & _MOST)
        expected = start + (((word & _MOST) + 3) & ~3)
        if expected > size:
            break
        parts.append((start, end))
        at = expected
        if word >> _LENGTH_BITS in (_WHOLE, _LAST):
            starts.append(parts[0][0])
            ends.append(end if len(parts) == 1 else _joined(buffer, parts))
            parts = []
            begin = at
    if final and begin < size:
        problem = (
            f"a RecordIO record is cut off: expected at least {expected - begin:,} bytes, found "
            f"{size - begin:,}"
        )
    return Split(_array(starts), _array(ends), begin, problem)


def _head_problem(magic: int, flag: int, in_parts: bool) -> str:
    if magic != _MAGIC:
        return f"expected RecordIO's magic number {_MAGIC:08x}, found {magic:08x}"
    if flag not in ((_MIDDLE, _LAST) if in_parts else (_WHOLE, _FIRST)):
        expected = "another part of a record" if in_parts else "a record's begin"
        return f"expected {expected}, found a RecordIO head with flag {flag}"
    return ""


def _joined(buffer: Bytes, parts: list[tuple[int, int]]) -> int:
    """Join the parts of a record in the buffer by the magic number; return the end."""
    end = parts[0][1]
    for start, stop in parts[1:]:
        buffer[end : end + 4] = np.frombuffer(_MAGIC_BYTES, np.uint8)
        buffer[end + 4 : end + 4 + stop - start] = buffer[start:stop]
        end += 4 + stop - start
    return end


def rows_within(buffer: Bytes, outer: Split, inner: Callable[[Bytes, bool], Split]) -> Split:
    """Return the rows of a format inside RecordIO records, each of which holds whole rows."""
    starts, ends = [_array([])], [_array([])]
    consumed, problem = outer.consumed, outer.problem
    for start, end in zip(outer.starts.tolist(), outer.ends.tolist(), strict=True):
        result = inner(buffer[start:end], True)
        starts.append(result.starts + start)
        ends.append(result.ends + start)
        if result.problem:
            consumed, problem = start + result.consumed, f"in a RecordIO record: {result.problem}"
            break
    return Split(np.concatenate(starts), np.concatenate(ends), consumed, problem)


def _array(values: list[int]) -> Numbers:
    return np.array(values, np.int64)
