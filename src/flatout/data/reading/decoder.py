"""Interfaces of formats of rows in sequence: finding rows in bytes, and decoding them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from flatout.data.reading.block import Block, Numbers, Values, take
from flatout.data.reading.buffers import Buffers
from flatout.data.reading.error_policy import ErrorPolicy
from flatout.data.reading.schema import Schema
from flatout.kernels import lines

# Bytes that are searched at a time for the last newline.
_BACK = 1 << 16


def split_lines(
    buffer: Bytes, final: bool, *, comment: bytes | None = None, white: bytes = b""
) -> Split:
    """Return the whole lines of a buffer, except blank lines and those starting with `comment`."""
    whole = len(buffer) if final else _last_newline(buffer) + 1
    starts, ends = lines.index_lines(
        buffer, 0, whole, skip_blank=True, comment=comment, white=white
    )
    return Split(starts, ends, whole)


def _last_newline(buffer: Bytes) -> int:
    stop = len(buffer)
    while stop:
        start = max(0, stop - _BACK)
        newlines = np.flatnonzero(buffer[start:stop] == 10)
        if len(newlines):
            return start + int(newlines[-1])
        stop = start
    return -1


Bytes: TypeAlias = npt.NDArray[np.uint8]
# Returns the location of a byte of the buffer, such as "day.svm:88121", for (row in the call,
# byte).
Where: TypeAlias = Callable[[int, int], str]
# For ragged columns, the number of values of each row; None if it is not known.
Lengths: TypeAlias = Mapping[str, Numbers] | None


class Split(NamedTuple):
    """Rows found in a buffer.

    Attributes:
        starts: first byte of each row, int64.
        ends: byte after each row, int64.
        consumed: number of bytes, from the buffer's start, that are processed. A row starts after
            these bytes.
        problem: error at byte `consumed`, after which no row can be found, or "".
    """

    starts: Numbers
    ends: Numbers
    consumed: int
    problem: str = ""


class Encoded(NamedTuple):
    """Rows as bytes in a buffer.

    Attributes:
        buffer: bytes that contain the rows.
        starts: first byte of each row, int64.
        ends: byte after each row, int64.
        numbers: index of each row in a block, int64.
        where: returns the location of a byte, for messages.
    """

    buffer: Bytes
    starts: Numbers
    ends: Numbers
    numbers: Numbers
    where: Where


class Survey(NamedTuple):
    """Facts from the first pass over rows.

    Attributes:
        good: whether each row can be decoded, bool of shape (rows,).
        lengths: number of values of each ragged column, int64 of shape (rows,) each.
        facts: numbers from which the format infers a schema.
    """

    good: npt.NDArray[np.bool_]
    lengths: Mapping[str, Numbers]
    facts: Mapping[str, float]


class StreamDecoder(Protocol):
    """Decoder of a stream's rows."""

    def split(self, buffer: Bytes, final: bool) -> Split:
        """Find the rows in a buffer; `final` states that no more bytes follow.

        Bytes after the first ones of a file are split by `split_rest`, where a decoder has it.
        """
        ...

    def decode(
        self, rows: Encoded, lengths: Lengths, buffers: Buffers, policy: ErrorPolicy
    ) -> Block:
        """Decode rows, without bad rows if `policy` skips them."""
        ...


class Decoder(StreamDecoder, Protocol):
    """A format with a schema. Several threads may call at once.

    Attributes:
        schema: schema of the blocks.
        needs_survey: whether `decode` needs the lengths of ragged columns.
    """

    schema: Schema
    needs_survey: bool

    def survey(self, rows: Encoded, policy: ErrorPolicy) -> Survey:
        """Return facts about rows, without decoding them."""
        ...


class Errors:
    """Status and position of error of each row, which a kernel fills in."""

    def __init__(
        self,
        rows: Encoded,
        codes: Any,
        policy: ErrorPolicy,
        explain: Callable[[int, int], tuple[str, str] | None] = lambda row, code: None,
    ) -> None:
        self.rows, self._codes, self._policy, self._explain = rows, codes, policy, explain
        self.status = np.zeros(len(rows.starts), np.uint8)
        self.at = np.zeros(len(rows.starts), np.int64)

    def report(self) -> npt.NDArray[np.bool_]:
        """Count the bad rows, or raise an error for the first; return which rows are good."""
        for row in np.flatnonzero(self.status):
            code = int(self.status[row])
            words, do = self._explain(int(row), code) or (str(self._codes(code).words), "fix it")
            self._policy.bad(words, self.rows.where(int(row), int(self.at[row])), do)
        good: npt.NDArray[np.bool_] = self.status == 0
        return good

    def block(self, columns: dict[str, Values], bad: int) -> Block:
        """Return a block of the good rows, after bad rows were counted or raised."""
        block = Block(columns, self.rows.numbers)
        return take(block, np.flatnonzero(self.report())) if bad else block


def good_rows(decoder: Decoder, rows: Encoded, policy: ErrorPolicy) -> Survey:
    numbers = np.arange(len(rows.starts), dtype=np.int64)
    block = decoder.decode(rows._replace(numbers=numbers), None, Buffers(), policy)
    good = np.zeros(len(numbers), bool)
    good[block.numbers] = True
    return Survey(good, {}, {})
