"""Rows of one length that are only ever appended, in memory or in a folder, by several processes.

    rows         the rows, one after the other
    filled.log   a RECORD for each of them, written behind it: its place says which row it is of

A row is kept once its record is whole. What a process that was killed had begun to write lies
behind the last record, and the next row is written over it.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import RLock
from typing import Any, NamedTuple, TypeAlias
from weakref import finalize

import numpy as np
import numpy.typing as npt
import torch

from flatout.data.block import Numbers
from flatout.data.buffers import Buffers
from flatout.kernels import crc32c_blocks, lines

Names: TypeAlias = npt.NDArray[np.uint64]
"""What rows are known by: uint64 of shape (rows, 2)."""

# `row` is the CRC-32C of the row, `own` that of the record's bytes before it.
RECORD = np.dtype([("name", np.uint64, 2), ("row", np.uint32), ("own", np.uint32)])
_SEALED = RECORD.itemsize - 4
_ALIGNED = 8
# Rows that are compared with their checksums in one go.
_COMPARED = 64
_FIRST_ROOM = 1024


class RowPart(NamedTuple):
    """One tensor of a row.

    Attributes:
        shape: of one sample's values.
        dtype: any of torch's.
        channels_last: whether the row holds (height, width, channels) of a `shape` of channels,
            height and width: as batches in channels_last memory have it.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    channels_last: bool = False

    @property
    def width(self) -> int:
        """Bytes of it."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


class KeptRows:
    """Rows by place. Several threads and processes may call at once.

    Args:
        parts: what a row holds.
        rows: descriptor of the file of rows, open to read and write; closed with this object.
        log: descriptor of the log, likewise.
        mapped: bytes of `rows` to map; 0 reads the file instead.

    Attributes:
        stride: bytes of a row.
        names: what the rows are known by, in the order of their places.
    """

    def __init__(self, parts: Sequence[RowPart], rows: int, log: int, mapped: int = 0) -> None:
        self.parts = tuple(parts)
        self._offsets = [self.stride_of(parts[:at]) for at in range(len(parts))]
        self.stride = max(_ALIGNED, self.stride_of(parts))
        self._rows, self._log = rows, log
        self._memory = np.frombuffer(mmap.mmap(rows, mapped), np.uint8) if mapped else None
        self._count = 0
        self._records = np.empty(_FIRST_ROOM, RECORD)
        # Compared with their checksums, or written by this process; and those that differ.
        self._whole = np.empty(_FIRST_ROOM, bool)
        self._bad = np.empty(_FIRST_ROOM, bool)
        self._lock = RLock()
        self._buffers = Buffers()
        self._close = finalize(self, _close, rows, log)

    @staticmethod
    def stride_of(parts: Sequence[RowPart]) -> int:
        """Bytes that a row of these parts takes."""
        return sum(-(-part.width // _ALIGNED) * _ALIGNED for part in parts)

    def __len__(self) -> int:
        return self._count

    def close(self) -> None:
        """Close the files; what was given stays valid."""
        self._close()

    @property
    def is_open(self) -> bool:
        """Whether `close` was not called."""
        return self._close.alive

    def refresh(self) -> Names:
        """Look for rows that were kept since, by any process; returns the names of these."""
        with self._lock:
            known = self._count
            size = os.fstat(self._log).st_size // RECORD.itemsize
            if size > known:
                data = _read(self._log, known * RECORD.itemsize, size * RECORD.itemsize)
                self._add(np.frombuffer(data, RECORD))
            return self._records["name"][known : self._count]

    def _add(self, records: npt.NDArray[Any], whole: bool = False) -> None:
        begin, self._count = self._count, self._count + len(records)
        if self._count > len(self._records):
            room = 2 * self._count
            self._records = np.resize(self._records, room)
            self._whole, self._bad = np.resize(self._whole, room), np.resize(self._bad, room)
        self._records[begin : self._count] = records
        self._whole[begin : self._count] = whole
        self._bad[begin : self._count] = _own_sums(records) != records["own"]

    def are_whole(self, places: Numbers) -> npt.NDArray[np.bool_]:
        """Which of these rows are what was written: compared when they are first asked for."""
        with self._lock:
            unknown = np.unique(places[~self._whole[places] & ~self._bad[places]])
            sums = self._records["row"][unknown]
        for at in range(0, len(unknown), _COMPARED):
            some = unknown[at : at + _COMPARED]
            good = self._sums_of(some) == sums[at : at + _COMPARED]
            with self._lock:
                self._whole[some], self._bad[some] = good, ~good
        with self._lock:
            are_good: npt.NDArray[np.bool_] = ~self._bad[places]
            return are_good

    def _sums_of(self, places: Numbers) -> npt.NDArray[np.int64]:
        room = self._buffers.empty((len(places), self.stride), np.uint8)
        try:
            self._copy(places, 0, self.stride, room)
        except lines.FileTooShort:
            return np.full(len(places), -1)
        return crc32c_blocks(room, self.stride)

    def read(self, places: Numbers, buffers: Buffers | None = None) -> list[torch.Tensor]:
        """Rows that are whole, a tensor for each part, in this order.

        Args:
            places: int64 of shape (count,).
            buffers: where their memory comes from.
        """
        given = []
        for part, offset in zip(self.parts, self._offsets, strict=True):
            width = part.width
            room = (buffers or self._buffers).empty((len(places), width), np.uint8)
            if width:
                self._copy(places, offset, width, room)
            given.append(_as_tensor(room, part))
        return given

    def _copy(self, places: Numbers, offset: int, width: int, out: npt.NDArray[np.uint8]) -> None:
        if self._memory is not None and self._mapped_rows >= self._count:
            rows = self._memory[: self._mapped_rows * self.stride].reshape(-1, self.stride)
            lines.split_rows(rows, places, [(offset, width, out)])
            return
        starts = places * self.stride + offset
        to = np.arange(len(places), dtype=np.int64) * width
        lines.read_rows(self._rows, starts, starts + width, out.reshape(-1), to)

    @property
    def _mapped_rows(self) -> int:
        return 0 if self._memory is None else len(self._memory) // self.stride

    @contextmanager
    def alone(self) -> Iterator[None]:
        """While no other process or thread appends; all that was kept before is known then."""
        with self._lock:
            # Opened each time: a lock belongs to the opening, which processes share after a fork.
            held = os.open(f"/proc/self/fd/{self._log}", os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(held, fcntl.LOCK_EX)
                yield
            finally:
                os.close(held)

    def append(self, names: Names, values: Sequence[torch.Tensor]) -> Numbers:
        """Keep rows, within `alone` and a `refresh`; returns their places.

        Args:
            names: of the rows.
            values: a tensor for each part, with a row for each name.

        Raises:
            OSError: they cannot be written. Nothing is kept then.
            ValueError: a tensor has another shape or dtype than its part.
        """
        packed = self._packed(len(names), values)
        records = np.empty(len(names), RECORD)
        records["name"] = names
        records["row"] = crc32c_blocks(packed, self.stride)
        records["own"] = _own_sums(records)
        first = self._count
        begin = first * RECORD.itemsize
        if os.fstat(self._log).st_size != begin:  # a part of a record, of a process that was killed
            os.ftruncate(self._log, begin)
        _write(self._rows, packed, first * self.stride)
        try:
            _write(self._log, records.view(np.uint8), begin)
        except OSError:
            os.ftruncate(self._log, begin)
            raise
        self._add(records, whole=True)
        return np.arange(first, first + len(names))

    def _packed(self, count: int, values: Sequence[torch.Tensor]) -> npt.NDArray[np.uint8]:
        pieces = []
        for part, offset, value in zip(self.parts, self._offsets, values, strict=True):
            if value.shape != (count, *part.shape) or value.dtype != part.dtype:
                raise ValueError(
                    f"expected {part.dtype} of shape {(count, *part.shape)}, found {value.dtype} "
                    f"of shape {tuple(value.shape)}"
                )
            pieces.append((offset, part.width, _bytes_of(value, part)))
        if len(pieces) == 1 and pieces[0][1] == self.stride:
            return pieces[0][2]
        packed = np.zeros((count, self.stride), np.uint8)
        lines.join_rows([one for one in pieces if one[1]], packed)
        return packed

    def flush(self) -> None:
        """Bring the rows to the disk, and then their records."""
        os.fsync(self._rows)
        os.fsync(self._log)


def _own_sums(records: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    sealed = records.view(np.uint8).reshape(len(records), RECORD.itemsize)[:, :_SEALED]
    return crc32c_blocks(np.ascontiguousarray(sealed), _SEALED)


def _bytes_of(value: torch.Tensor, part: RowPart) -> npt.NDArray[np.uint8]:
    value = value.detach().cpu()
    if part.channels_last:
        value = value.permute(0, 2, 3, 1)
    flat = value.contiguous().reshape(len(value), -1)
    return flat.view(torch.uint8).numpy() if flat.numel() else np.empty((len(value), 0), np.uint8)


def _as_tensor(room: npt.NDArray[np.uint8], part: RowPart) -> torch.Tensor:
    flat = torch.from_numpy(room.reshape(-1)).view(part.dtype)
    if not part.channels_last:
        return flat.reshape(len(room), *part.shape)
    channels, height, width = part.shape
    return flat.reshape(len(room), height, width, channels).permute(0, 3, 1, 2)


def _read(number: int, start: int, stop: int) -> bytes:
    found = []
    while start < stop and (piece := os.pread(number, stop - start, start)):
        found.append(piece)
        start += len(piece)
    data = b"".join(found)
    return data[: len(data) - len(data) % RECORD.itemsize]


def _write(number: int, array: npt.NDArray[np.uint8], place: int) -> None:
    data = array.reshape(-1).data
    while data:
        written = os.pwrite(number, data, place)
        data, place = data[written:], place + written


def _close(*numbers: int) -> None:
    for number in numbers:
        os.close(number)
