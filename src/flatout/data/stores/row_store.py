"""Decoded rows of equal length, so that a row starts at its slot number times the length.

The values of a row are next to each other, so that fetching a row takes one memory access instead
of one for each column. Ragged values are in an arena of their own; the row holds their place and
length.
"""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from threading import Lock
from typing import Any, NamedTuple, Protocol
from weakref import finalize

import numpy as np
import numpy.typing as npt

from flatout.data.reading.block import Block, Numbers, Ragged, Values, is_channels_last, offsets_of
from flatout.data.reading.buffers import Buffers
from flatout.kernels import lines

# Position of a ragged row's values in an arena.
PLACE = np.dtype([("start", np.int64), ("length", np.int64)])
# Alignment of a row, in bytes.
_ALIGNED = 8


class Field(NamedTuple):
    """Position and form of a column in a row.

    Attributes:
        name: name of the column.
        dtype: dtype of the values.
        shape: shape of one row's values; () for ragged columns too.
        ragged: whether the row holds a position in an arena instead of values.
        offset: first byte in the row.
        width: number of bytes.
        channels_last: whether the row holds (height, width, channels) instead of `shape`.
    """

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    ragged: bool
    offset: int
    width: int
    channels_last: bool = False


class Layout(NamedTuple):
    """Layout of rows.

    Attributes:
        fields: the columns, in the order of their bytes.
        stride: bytes of a row.
    """

    fields: tuple[Field, ...]
    stride: int


def layout_of(columns: Mapping[str, Values]) -> Layout:
    """Return a layout for these columns, with the widest values first, so that all are aligned."""
    named = []
    for name, values in columns.items():
        ragged = isinstance(values, Ragged)
        array = values.values if isinstance(values, Ragged) else values
        item = PLACE.itemsize if ragged else array.dtype.itemsize
        named.append((-min(item, _ALIGNED), name, array, ragged))
    fields, offset = [], 0
    for _, name, array, ragged in sorted(named, key=lambda value: value[:2]):
        shape = () if ragged else array.shape[1:]
        width = PLACE.itemsize if ragged else math.prod(shape) * array.dtype.itemsize
        last = is_channels_last(array)
        fields.append(Field(name, array.dtype, shape, ragged, offset, width, last))
        offset += width
    return Layout(tuple(fields), -(-offset // _ALIGNED) * _ALIGNED)


class Arena(Protocol):
    """Values of one ragged column, in the order in which they came."""

    def append(self, values: npt.NDArray[Any]) -> int:
        """Append values; return the position of the first."""
        ...

    def values(self) -> npt.NDArray[Any]: ...

    def check(self, places: npt.NDArray[Any]) -> None: ...


class MemoryArena:
    """Values that are kept in memory, which grows."""

    def __init__(self, dtype: np.dtype[Any]) -> None:
        self._values = np.empty(1024, dtype)
        self._used = 0

    def append(self, values: npt.NDArray[Any]) -> int:
        start, stop = self._used, self._used + len(values)
        if stop > len(self._values):
            grown = np.empty(max(stop, 2 * len(self._values)), self._values.dtype)
            grown[:start] = self._values[:start]
            self._values = grown
        self._values[start:stop] = values
        self._used = stop
        return start

    def values(self) -> npt.NDArray[Any]:
        return self._values[: self._used]

    def check(self, places: npt.NDArray[Any]) -> None:
        """Do nothing: values in memory have no checksums."""


class RowStore:
    """Rows in memory or in a mapped file, by slot. Several threads may call at once."""

    def __init__(
        self, layout: Layout, rows: npt.NDArray[np.uint8], arenas: Sequence[Arena]
    ) -> None:
        self.layout = layout
        self.rows = rows
        self.arenas = arenas
        # called with slots before their rows are read
        self.check: Callable[[Numbers], None] | None = None
        self._lock = Lock()

    def put(self, slots: Numbers, columns: Mapping[str, Values]) -> npt.NDArray[np.uint8]:
        """Store rows; return their stored bytes, uint8 of shape (rows, stride)."""
        packed = np.zeros((len(slots), self.layout.stride), np.uint8)
        arenas = iter(self.arenas)
        pieces = []
        for field in self.layout.fields:
            values = columns[field.name]
            if isinstance(values, Ragged):
                values = self._places(values, next(arenas))
            elif field.channels_last:
                values = values.transpose(0, 2, 3, 1)
            pieces.append((field.offset, field.width, np.ascontiguousarray(values)))
        lines.join_rows(pieces, packed)
        self.rows[slots] = packed
        return packed

    def get(
        self, slots: Numbers, buffers: Buffers, without: Collection[str] = ()
    ) -> dict[str, Values]:
        """Return the rows of these slots, in this order, without the columns in `without`.

        Columns in `without` are not ragged.
        """
        if self.check is not None:
            self.check(slots)
        fields = [field for field in self.layout.fields if field.name not in without]
        outs = {field.name: _room(field, len(slots), buffers) for field in fields}
        pieces = [(field.offset, field.width, outs[field.name]) for field in fields]
        if pieces:
            lines.split_rows(self.rows, np.ascontiguousarray(slots, np.int64), pieces)
        arenas = iter(self.arenas)
        columns: dict[str, Values] = {}
        for field in fields:
            out = outs[field.name]
            if field.ragged:
                columns[field.name] = fetch(out, next(arenas))
            else:
                columns[field.name] = out.transpose(0, 3, 1, 2) if field.channels_last else out
        return columns

    def in_place(self) -> dict[str, npt.NDArray[Any]]:
        """Return the columns that are not ragged, of all slots, as views. Check rows before use."""
        result = {}
        for field in self.layout.fields:
            if field.ragged:
                continue
            own = self.rows[:, field.offset : field.offset + field.width].view(field.dtype)
            if field.channels_last:
                channels, height, width = field.shape
                own = own.reshape(-1, height, width, channels).transpose(0, 3, 1, 2)
            result[field.name] = own if field.channels_last else own.reshape(-1, *field.shape)
        return result

    def _places(self, values: Ragged, arena: Arena) -> npt.NDArray[Any]:
        first, last = int(values.offsets[0]), int(values.offsets[-1])
        with self._lock:
            start = arena.append(values.values[first:last])
        places = np.empty(len(values.offsets) - 1, PLACE)
        places["start"] = values.offsets[:-1] - first + start
        places["length"] = np.diff(values.offsets)
        return places


class SharedRows(RowStore):
    """Rows in an anonymous file that processes share, however they started.

    Only rows that were stored use memory.

    Args:
        layout: layout of the rows, without ragged fields.
        count: slots 0 to count - 1 can be stored.
        owner: process and file descriptor of the file's creator; None creates a file.
    """

    def __init__(self, layout: Layout, count: int, owner: tuple[int, int] | None = None) -> None:
        size = count * (layout.stride + 1)
        if owner is None:
            file = os.memfd_create("flatout-rows", os.MFD_CLOEXEC)
            os.ftruncate(file, size)
            owner = (os.getpid(), file)
        else:
            file = os.open(f"/proc/{owner[0]}/fd/{owner[1]}", os.O_RDWR | os.O_CLOEXEC)
        finalize(self, os.close, file)
        memory = np.frombuffer(mmap.mmap(file, size), np.uint8)
        rows, self._there = np.split(memory, [count * layout.stride])
        super().__init__(layout, rows.reshape(count, layout.stride), ())
        self._owner = owner

    def __reduce__(self) -> Any:
        return SharedRows, (self.layout, len(self.rows), self._owner)

    def has(self, slots: Numbers) -> npt.NDArray[np.bool_]:
        """Return which of these rows any process has stored; False for invalid slots."""
        are_slots = (slots >= 0) & (slots < len(self.rows))
        there: npt.NDArray[np.bool_] = self._there[np.where(are_slots, slots, 0)] == 1
        return are_slots & there

    def put(self, slots: Numbers, columns: Mapping[str, Values]) -> npt.NDArray[np.uint8]:
        """Store rows; return their stored bytes, uint8 of shape (rows, stride)."""
        packed = super().put(slots, columns)
        self._there[slots] = 1
        return packed


def _room(field: Field, rows: int, buffers: Buffers) -> npt.NDArray[Any]:
    if field.ragged:
        return buffers.empty(rows, PLACE)
    if field.channels_last:
        channels, height, width = field.shape
        return buffers.empty((rows, height, width, channels), field.dtype)
    return buffers.empty((rows, *field.shape), field.dtype)


def fetch(places: npt.NDArray[Any], arena: Arena) -> Ragged:
    """Return the values of an arena at some positions, which are of dtype PLACE."""
    arena.check(places)
    lengths = places["length"]
    offsets = offsets_of(lengths)
    at = np.arange(offsets[-1]) + np.repeat(places["start"] - offsets[:-1], lengths)
    return Ragged(arena.values()[at], offsets)


def row_bytes(block: Block) -> float:
    """Return the average bytes of one row of the block, with ragged values."""
    layout = layout_of(block.columns)
    ragged = sum(
        int(values.offsets[-1] - values.offsets[0]) * values.values.itemsize
        for values in block.columns.values()
        if isinstance(values, Ragged)
    )
    return layout.stride + ragged / max(1, len(block))
