"""Decoded rows, column by column, as readers return them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from flatout.errors import DataError

Numbers: TypeAlias = npt.NDArray[np.int64]


class Ragged(NamedTuple):
    """Rows of different lengths, in sequence.

    Attributes:
        values: values of all rows.
        offsets: int64 of shape (rows + 1,); row i is `values[offsets[i]:offsets[i + 1]]`.
    """

    values: npt.NDArray[Any]
    offsets: Numbers


Values: TypeAlias = npt.NDArray[Any] | Ragged


@dataclass(frozen=True, slots=True)
class Block:
    """Some decoded rows.

    Attributes:
        columns: values of each column, by name: an array of shape (rows, *shape), or a Ragged.
        numbers: index of each row in the source, int64 of shape (rows,). Rows that could not be
            decoded are missing, if the user chose to skip such rows.
    """

    columns: Mapping[str, Values]
    numbers: Numbers

    def __len__(self) -> int:
        return len(self.numbers)


def rows_of(values: Values) -> int:
    return len(values.offsets) - 1 if isinstance(values, Ragged) else len(values)


def take(block: Block, index: Numbers) -> Block:
    """Return the rows at the positions `index` of the block, in that order."""
    columns = {name: take_values(values, index) for name, values in block.columns.items()}
    return Block(columns, block.numbers[index])


def as_ragged(values: Values) -> Ragged:
    if isinstance(values, Ragged):
        return values
    if values.ndim != 2:
        raise DataError(f"expected vectors as in other samples, found shape {values.shape[1:]}")
    rows, length = values.shape
    return Ragged(values.reshape(-1), np.arange(rows + 1, dtype=np.int64) * length)


def rows_between(block: Block, start: int, stop: int) -> Block:
    """Return rows `start` to `stop` of the block, without a copy."""
    columns: dict[str, Values] = {}
    for name, values in block.columns.items():
        if isinstance(values, Ragged):
            first, last = values.offsets[start], values.offsets[stop]
            offsets = values.offsets[start : stop + 1] - first
            columns[name] = Ragged(values.values[first:last], offsets)
        else:
            columns[name] = values[start:stop]
    return Block(columns, block.numbers[start:stop])


def take_values(values: Values, index: Numbers) -> Values:
    if not isinstance(values, Ragged):
        if is_channels_last(values):
            return np.take(values.transpose(0, 2, 3, 1), index, axis=0).transpose(0, 3, 1, 2)
        return values[index] if values.ndim == 1 else np.take(values, index, axis=0)
    lengths = np.diff(values.offsets)[index]
    offsets = offsets_of(lengths)
    # Position of each value: the start of its row in the source, plus its position within the row.
    places = np.arange(offsets[-1]) + np.repeat(values.offsets[index] - offsets[:-1], lengths)
    return Ragged(values.values[places], offsets)


def is_channels_last(values: npt.NDArray[Any]) -> bool:
    """Return whether an array of shape (rows, channels, height, width) is channels_last."""
    if values.ndim != 4 or values.flags.c_contiguous:
        return False
    return values.transpose(0, 2, 3, 1).flags.c_contiguous


def offsets_of(lengths: npt.ArrayLike) -> Numbers:
    """Return the start of each row of these lengths, and the end of the last row."""
    counts = np.asarray(lengths)
    offsets = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=offsets[1:])
    return offsets


def join(blocks: Sequence[Block]) -> Block:
    blocks = [block for block in blocks if len(block)] or blocks[:1]
    if len(blocks) == 1:
        return blocks[0]
    columns = {
        name: _join_values([block.columns[name] for block in blocks]) for name in blocks[0].columns
    }
    return Block(columns, np.concatenate([block.numbers for block in blocks]))


def cut(blocks: Iterator[Block], size: Callable[[int], int]) -> Iterator[Block]:
    """Yield the same rows in new blocks. Block k has `size(k)` rows; the last may have fewer."""
    waiting: list[Block] = []
    count = at = 0
    for block in blocks:
        waiting.append(block)
        count += len(block)
        if count < size(at):
            continue
        whole, start = join(waiting), 0
        while count - start >= size(at):
            yield take(whole, np.arange(start, start + size(at)))
            start += size(at)
            at += 1
        waiting = [take(whole, np.arange(start, count))] if start < count else []
        count -= start
    if count:
        yield join(waiting)


def _join_values(parts: Sequence[Any]) -> Values:
    vectors = all(isinstance(part, Ragged) or part.ndim == 2 for part in parts)
    widths = {None if isinstance(part, Ragged) else part.shape[1:] for part in parts}
    if not vectors or (len(widths) == 1 and None not in widths):
        return np.concatenate(parts)
    parts = [as_ragged(part) for part in parts]
    lengths = np.concatenate([np.diff(part.offsets) for part in parts])
    return Ragged(np.concatenate([part.values for part in parts]), offsets_of(lengths))
