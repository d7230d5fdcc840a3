"""What a format of rows in sequence has to offer: to find rows in bytes, and decode them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from flatout.data.block import Block, Numbers, Values, take
from flatout.data.buffers import Buffers
from flatout.data.error_policy import ErrorPolicy
from flatout.data.schema import Schema

Bytes: TypeAlias = npt.NDArray[np.uint8]
# Names the place of a byte of the buffer, such as "day.svm:88121": (row in the call, byte).
Where: TypeAlias = Callable[[int, int], str]
# Of ragged columns, how many values each row has; None where that is not known.
Lengths: TypeAlias = Mapping[str, Numbers] | None


class Split(NamedTuple):
    """Rows found in a buffer.

    Attributes:
        consumed: bytes from the buffer's begin that are dealt with; the rest is a row's begin.
        problem: what is wrong at byte `consumed`, where no further row can be found, or "".
    """

    starts: Numbers
    ends: Numbers
    consumed: int
    problem: str = ""


class Encoded(NamedTuple):
    """Rows as a file has them.

    Attributes:
        starts: where each begins in the buffer, int64.
        numbers: what each is called in a block, int64.
    """

    buffer: Bytes
    starts: Numbers
    ends: Numbers
    numbers: Numbers
    where: Where


class Survey(NamedTuple):
    """What a first look at rows found.

    Attributes:
        good: bool of shape (rows,): whether a row is as it should be.
        lengths: number of values of each ragged column, int64 of shape (rows,) each.
        facts: numbers that the format infers a schema from.
    """

    good: npt.NDArray[np.bool_]
    lengths: Mapping[str, Numbers]
    facts: Mapping[str, float]


class StreamDecoder(Protocol):
    """What the rows of a stream are decoded by."""

    def split(self, buffer: Bytes, final: bool) -> Split:
        """Find the rows in a buffer; `final` says that no more bytes follow.

        What does not begin a file is split by `split_rest`, where a decoder has one.
        """
        ...

    def decode(
        self, rows: Encoded, lengths: Lengths, buffers: Buffers, policy: ErrorPolicy
    ) -> Block:
        """Decode rows; those that are bad are left out, where `policy` skips them."""
        ...


class Decoder(StreamDecoder, Protocol):
    """A format with a schema. Several threads may call at once.

    Attributes:
        schema: of the blocks.
        needs_survey: whether `decode` must be told the lengths of ragged columns.
    """

    schema: Schema
    needs_survey: bool

    def survey(self, rows: Encoded, policy: ErrorPolicy) -> Survey:
        """Look at rows without keeping them."""
        ...


class Errors:
    """Of rows that a kernel reads, status and place of errors, for it to fill."""

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
        """Count the bad rows, or raise for the first. Gives which are good."""
        for row in np.flatnonzero(self.status):
            code = int(self.status[row])
            words, do = self._explain(int(row), code) or (str(self._codes(code).words), "fix it")
            self._policy.bad(words, self.rows.where(int(row), int(self.at[row])), do)
        good: npt.NDArray[np.bool_] = self.status == 0
        return good

    def block(self, columns: dict[str, Values], bad: int) -> Block:
        """A block of the good rows, after the bad ones were counted or raised."""
        block = Block(columns, self.rows.numbers)
        return take(block, np.flatnonzero(self.report())) if bad else block


def good_rows(decoder: Decoder, rows: Encoded, policy: ErrorPolicy) -> Survey:
    """A survey by decoding rows."""
    numbers = np.arange(len(rows.starts), dtype=np.int64)
    block = decoder.decode(rows._replace(numbers=numbers), None, Buffers(), policy)
    good = np.zeros(len(numbers), bool)
    good[block.numbers] = True
    return Survey(good, {}, {})
