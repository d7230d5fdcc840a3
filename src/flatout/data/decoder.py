"""What a format of rows in sequence has to offer: to find rows in bytes, and decode them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from flatout.data.block import Block, Numbers, Values, take
from flatout.data.error_policy import ErrorPolicy
from flatout.data.execution.buffers import Buffers
from flatout.data.schema import Schema

Bytes: TypeAlias = npt.NDArray[np.uint8]
# Names the place of a byte of the buffer, such as "day.svm:88121": (row in the call, byte).
Where: TypeAlias = Callable[[int, int], str]


class Split(NamedTuple):
    """Rows found in a buffer.

    Attributes:
        starts: where rows begin, int64.
        ends: where they end, int64.
        consumed: bytes from the buffer's begin that are dealt with; the rest is a row's begin.
        problem: what is wrong at byte `consumed`, where no further row can be found, or "".
    """

    starts: Numbers
    ends: Numbers
    consumed: int
    problem: str = ""


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


class Decoder(Protocol):
    """A format with a schema. Several threads may call at once.

    Attributes:
        schema: of the blocks.
        needs_survey: whether `decode` must be told the lengths of ragged columns.
    """

    schema: Schema
    needs_survey: bool

    def split(self, buffer: Bytes, final: bool) -> Split:
        """Find the rows in a buffer; `final` says that no more bytes follow.

        What does not begin a file is split by `split_rest`, where a decoder has one.
        """
        ...

    def survey(
        self, buffer: Bytes, starts: Numbers, ends: Numbers, faults: ErrorPolicy, where: Where
    ) -> Survey:
        """Look at rows without keeping them."""
        ...

    def decode(
        self,
        buffer: Bytes,
        starts: Numbers,
        ends: Numbers,
        numbers: Numbers,
        lengths: Mapping[str, Numbers] | None,
        buffers: Buffers,
        faults: ErrorPolicy,
        where: Where,
    ) -> Block:
        """Decode rows; those that are bad are left out, where `faults` skips them.

        Args:
            buffer: holds them.
            starts: where each begins in the buffer.
            ends: where each ends.
            numbers: what each is called in the block.
            lengths: of ragged columns; found by a survey where it is None and needed.
            buffers: gives the arrays.
            faults: what to do about bad rows.
            where: names a row's place.
        """
        ...


def without_bad(
    columns: dict[str, Values],
    numbers: Numbers,
    status: npt.NDArray[np.uint8],
    at: Numbers,
    words: Callable[[int], str],
    faults: ErrorPolicy,
    where: Where,
) -> Block:
    """A block of the good rows, after the bad ones were counted or raised."""
    report(status, at, words, faults, where)
    return take(Block(columns, numbers), np.flatnonzero(status == 0))


def report(
    status: npt.NDArray[np.uint8],
    at: Numbers,
    words: Callable[[int], str],
    faults: ErrorPolicy,
    where: Where,
) -> None:
    """Count the bad rows, or raise for the first."""
    for row in np.flatnonzero(status):
        faults.bad(words(int(status[row])), where(int(row), int(at[row])))


def scratch(rows: int) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Status and place of errors, for the kernels to fill."""
    return np.zeros(rows, np.uint8), np.zeros(rows, np.int64)
