"""Interfaces of formats: rows by index, chunks of rows, or a stream of rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, TypeAlias, TypeGuard

import numpy.typing as npt

from flatout.data.reading.block import Block, Numbers
from flatout.data.reading.buffers import Buffers
from flatout.data.reading.schema import Schema

# Returns the values of all ranks, in the order of ranks, for the value of this rank.
Gather: TypeAlias = Callable[[Any], list[Any]]


def alone(value: Any) -> list[Any]:
    """Return the values of all ranks where there is only one rank."""
    return [value]


class Origin(Protocol):
    """Members that rows, chunks and streams have in common.

    Attributes:
        schema: schema of the blocks.
    """

    schema: Schema

    @property
    def digest(self) -> str:
        """16 hex digits that differ for other data."""
        ...

    def describe(self) -> str:
        """Return one line for the user, such as "19 LibSVM files, 18.4 GB, 41,200,000 rows"."""
        ...

    def notes(self) -> list[str]:
        """Return lines that the user should read, such as the number of skipped rows."""
        return []

    def skipped(self, gather: Gather = alone) -> list[str]:
        """Return lines about rows that any rank has skipped or changed since the last call."""
        return []


class Rows(Origin, Protocol):
    """Rows by index: seekable and counted. Several threads may call all methods at once.

    Attributes:
        rows: number of rows, without the rows that were skipped for errors.
        random: whether reading rows in any order costs about as much as in sequence.
    """

    rows: int
    random: bool

    def take(self, numbers: Numbers, buffers: Buffers) -> Block:
        """Decode these rows, in this order, into arrays from `buffers`."""
        ...

    def targets(self) -> npt.NDArray[Any] | None:
        """Return the target of every row where targets are known without decoding the rows."""
        return None

    def row_stamps(self, numbers: Numbers | None = None) -> Sequence[str] | None:
        """Return a text for each row that identifies its data, and does not depend on other rows.

        The first line of a text names the row's data for the user. All lines together differ if the
        data were replaced.
        """
        return None

    def input_words(self) -> str:
        """Return the settings that, together with the data of a row, decide its inputs."""
        return self.schema.dumps()

    def row_keys(self) -> Sequence[str] | None:
        """Return a name of each row, equal on all machines and independent of the other rows."""
        return None

    def lengths(self) -> Numbers | None:
        """Return the length of each ragged row, if it is known without decoding."""
        return None

    def where(self, number: int) -> str:
        """Return the location of a row in the data, such as "day.svm:88121"."""
        ...


class Chunks(Origin, Protocol):
    """Rows that are decoded in chunks, such as Parquet's row groups. Methods as in Rows."""

    sizes: Numbers
    """Rows of each chunk, int64 of shape (chunks,)."""

    def read(self, chunk: int, buffers: Buffers) -> Block:
        """Decode one chunk. `numbers` of the block count from 0 over all chunks."""
        ...

    def where(self, number: int) -> str:
        """Return the location of a row in the data."""
        ...


class Stream(Origin, Protocol):
    """Rows that come in sequence, such as from a pipe: not seekable.

    Attributes:
        rows: number of rows in an epoch, or None if it is not known.
    """

    rows: int | None

    def blocks(self, epoch: int, buffers: Buffers) -> Iterator[Block]:
        """Yield the rows of an epoch in blocks of any size; `numbers` count from 0."""
        ...


def is_rows(origin: Any) -> TypeGuard[Rows]:
    """Return whether an origin offers rows by index. Checks the class: properties may be slow."""
    return hasattr(type(origin), "take")


def is_chunks(origin: Any) -> TypeGuard[Chunks]:
    return hasattr(type(origin), "read") and not is_rows(origin)


def is_stream(origin: Any) -> TypeGuard[Stream]:
    """Return whether an origin offers rows in sequence."""
    return hasattr(type(origin), "blocks")
