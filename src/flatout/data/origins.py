"""What a format has to offer to be read: rows by number, chunks of rows, or a stream of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, TypeAlias, TypeGuard

import numpy.typing as npt

from flatout.data.block import Block, Numbers
from flatout.data.buffers import Buffers
from flatout.data.schema import Schema

# Gives the values of all ranks, by rank, for this rank's own.
Gather: TypeAlias = Callable[[Any], list[Any]]


def alone(value: Any) -> list[Any]:
    """The values of all ranks where there is one."""
    return [value]


class Origin(Protocol):
    """What all of them offer.

    Attributes:
        schema: of the blocks.
    """

    schema: Schema

    @property
    def digest(self) -> str:
        """16 hex digits that differ for other data."""
        ...

    def describe(self) -> str:
        """One line for people, such as "19 LibSVM files, 18.4 GB, 41,200,000 rows"."""
        ...

    def notes(self) -> list[str]:
        """What the user should know, such as how many rows were skipped."""
        return []

    def skipped(self, gather: Gather = alone) -> list[str]:
        """Return lines about rows that any rank has skipped or changed since the last call."""
        return []


class Rows(Origin, Protocol):
    """Rows by number: seekable and counted. All methods may be called by several threads at once.

    Attributes:
        rows: how many there are; rows that were skipped for errors are not counted.
        random: whether rows in any order cost about as much as in sequence.
    """

    rows: int
    random: bool

    def take(self, numbers: Numbers, buffers: Buffers) -> Block:
        """Decode these rows, in this order, into arrays from `buffers`."""
        ...

    def targets(self) -> npt.NDArray[Any] | None:
        """The target column of all rows where it is known without decoding them."""
        return None

    def row_stamps(self, numbers: Numbers | None = None) -> Sequence[str] | None:
        """What rows are read from, in words that stay when other rows come or go.

        The first line names it for people; all lines together differ where it was replaced.
        """
        return None

    def input_words(self) -> str:
        """What decides about the inputs of a row, beside what it is read from."""
        return self.schema.dumps()

    def row_keys(self) -> Sequence[str] | None:
        """What each row is called, the same on any machine and when other rows come or go."""
        return None

    def lengths(self) -> Numbers | None:
        """How long each row is where rows are ragged and that is known without decoding them."""
        return None

    def where(self, number: int) -> str:
        """Where a row stands, such as "day.svm:88121"."""
        ...


class Chunks(Origin, Protocol):
    """Rows that are decoded in chunks, such as Parquet's row groups. Methods as those of Rows."""

    sizes: Numbers
    """Rows of each chunk, int64 of shape (chunks,)."""

    def read(self, chunk: int, buffers: Buffers) -> Block:
        """Decode one chunk; `numbers` count from 0 over all chunks."""
        ...

    def where(self, number: int) -> str:
        """Where a row stands."""
        ...


class Stream(Origin, Protocol):
    """Rows that come one after the other, such as from a pipe: not seekable.

    Attributes:
        rows: how many come in an epoch, where that is known.
    """

    rows: int | None

    def blocks(self, epoch: int, buffers: Buffers) -> Iterator[Block]:
        """The rows of an epoch from its begin, in blocks of any size; `numbers` count from 0."""
        ...


def is_rows(origin: Any) -> TypeGuard[Rows]:
    """Whether it offers rows by number. Looks at the class alone: properties may cost much."""
    return hasattr(type(origin), "take")


def is_chunks(origin: Any) -> TypeGuard[Chunks]:
    """Whether it offers chunks of rows."""
    return hasattr(type(origin), "read") and not is_rows(origin)


def is_stream(origin: Any) -> TypeGuard[Stream]:
    """Whether it offers rows one after the other."""
    return hasattr(type(origin), "blocks")
