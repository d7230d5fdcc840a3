"""Rows of one length that several processes append, in memory or in a folder.

    rows         the rows, in sequence
    filled.log   a RECORD for each row, in the order of the rows

A row is stored once its whole record is written, which happens after the row. If a process is
killed while it writes, the unfinished row is after the last record, and the next row overwrites it.
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

from flatout.data.reading.block import Numbers
from flatout.data.reading.buffers import Buffers
from flatout.kernels import crc32c, crc32c_blocks, lines
from flatout.measure import available_bytes

Names: TypeAlias = npt.NDArray[np.uint64]
"""Names of rows: uint64 of shape (rows, 2)."""

# `row` is the CRC-32C of the row; `own` is the CRC-32C of the record's bytes before it.
RECORD = np.dtype([("name", np.uint64, 2), ("row", np.uint32), ("own", np.uint32)])
# Bytes of a record that its own checksum covers.
_SEALED = RECORD.itemsize - 4
# Alignment of each tensor of a row, in bytes.
_ALIGNED = 8
# Records for which memory is allocated at first.
_FIRST_ROOM = 1024


class RowPart(NamedTuple):
    """One tensor of a row.

    Attributes:
        shape: shape of one sample's values.
        dtype: any of torch's dtypes.
        channels_last: whether the row holds (height, width, channels), where `shape` is channels,
            height and width. Batches in channels_last memory have this layout.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    channels_last: bool = False

    @property
    def width(self) -> int:
        """Bytes of the tensor."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


class Files(NamedTuple):
    """Descriptors of open files.

    Attributes:
        rows: descriptor of the file of rows, open to read and write.
        log: descriptor of the log, open to read and write.
        on_disk: whether the files are on disk, and not in memory.
    """

    rows: int
    log: int
    on_disk: bool


class RowLog:
    """Rows by position. Several threads and processes may call at once.

    Attributes:
        stride: bytes of a row.
    """

    def __init__(self, parts: Sequence[RowPart], files: Files, expected: int = 0) -> None:
        self.parts = tuple(parts)
        self._offsets = [self.stride_of(parts[:at]) if at else 0 for at in range(len(parts))]
        self.stride = self.stride_of(parts)
        self._files = files
        self._expected = expected
        self._map = mmap.mmap(-1, self.stride)
        self._is_large = False  # compared with the memory that the system has for file pages
        self._count = 0
        self._records = np.empty(_FIRST_ROOM, RECORD)
        # _whole: rows that equal their checksums, or that this process wrote. _bad: rows that
        # differ from their checksums.
        self._whole = np.empty(_FIRST_ROOM, bool)
        self._bad = np.empty(_FIRST_ROOM, bool)
        self._lock = RLock()
        self._buffers = Buffers()
        self._close = finalize(self, _close, files.rows, files.log)

    @staticmethod
    def stride_of(parts: Sequence[RowPart]) -> int:
        return max(_ALIGNED, sum(-(-part.width // _ALIGNED) * _ALIGNED for part in parts))

    def __len__(self) -> int:
        return self._count

    def close(self) -> None:
        """Close the files; tensors that were returned stay valid."""
        self._close()

    @property
    def is_open(self) -> bool:
        return self._close.alive

    @property
    def is_on_disk(self) -> bool:
        return self._files.on_disk

    def kept(self) -> Numbers:
        """Return the positions of all rows that are not damaged."""
        self.refresh()
        with self._lock:
            return np.flatnonzero(~self._bad[: self._count])

    def refresh(self) -> Numbers:
        """Find rows that any process has stored since the last call, and return their positions."""
        with self._lock:
            known = self._count
            size = os.fstat(self._files.log).st_size // RECORD.itemsize
            if size > known:
                data = _read(self._files.log, known * RECORD.itemsize, size * RECORD.itemsize)
                self._add(np.frombuffer(data, RECORD))
            return known + np.flatnonzero(~self._bad[known : self._count])

    def names(self, places: Numbers) -> Names:
        with self._lock:
            names: Names = self._records["name"][places]
            return names

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
        """Return which of these rows equal their checksums, compared at a row's first use."""
        with self._lock:
            unknown = np.unique(places[~self._whole[places] & ~self._bad[places]])
            sums = self._records["row"][unknown]
        if len(unknown):
            good = self._sums_of(unknown) == sums
            with self._lock:
                self._whole[unknown], self._bad[unknown] = good, ~good
        with self._lock:
            are_good: npt.NDArray[np.bool_] = ~self._bad[places]
            return are_good

    def _sums_of(self, places: Numbers) -> list[int]:
        try:
            rows = memoryview(self._mapped_for(places, is_cold=True))
        except EOFError:
            return [-1] * len(places)
        starts = (places * self.stride).tolist()
        return [crc32c(rows[start : start + self.stride]) for start in starts]

    def read(
        self, places: Numbers, buffers: Buffers | None = None, which: slice = slice(None)
    ) -> list[torch.Tensor]:
        """Return undamaged rows: a tensor for each part, in this order."""
        parts, offsets = self.parts[which], self._offsets[which]
        if not parts:
            return []
        rows = np.frombuffer(self._mapped_for(places, self._is_large), np.uint8)
        widths = [part.width for part in parts]
        pool = buffers or self._buffers
        rooms = [pool.empty((len(places), width), np.uint8) for width in widths]
        pieces = [item for item in zip(offsets, widths, rooms, strict=True) if item[1]]
        lines.split_rows(rows.reshape(-1, self.stride), places, pieces)
        return [_as_tensor(*item) for item in zip(rooms, parts, strict=True)]

    def _mapped_for(self, places: Numbers, is_cold: bool) -> mmap.mmap:
        mapped = self._mapped()
        if len(places) and os.fstat(self._files.rows).st_size < len(mapped):
            raise EOFError(f"the rows of kept features end at byte {len(mapped):,} no longer")
        if is_cold and self._files.on_disk:
            # The disk then reads all rows at once, instead of each row when it is copied.
            for start in (places * self.stride).tolist():
                begin = start - start % mmap.PAGESIZE
                mapped.madvise(mmap.MADV_WILLNEED, begin, start + self.stride - begin)
        return mapped

    def _mapped(self) -> mmap.mmap:
        with self._lock:
            if self._count * self.stride > len(self._map):
                size = os.fstat(self._files.rows).st_size // self.stride * self.stride
                if size < self._count * self.stride:
                    raise EOFError("the rows of kept features are fewer than their log says")
                self._map = mmap.mmap(self._files.rows, size, prot=mmap.PROT_READ)
                self._is_large = size > available_bytes() // 2
            return self._map

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Lock out other processes and threads that append. A `refresh` then finds all rows."""
        with self._lock:
            # Opened each time: a lock belongs to an open file, which processes share after a fork.
            held = os.open(f"/proc/self/fd/{self._files.log}", os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(held, fcntl.LOCK_EX)
                yield
            finally:
                os.close(held)

    def append(self, names: Names, values: Sequence[torch.Tensor]) -> Numbers:
        """Append rows, within `alone` and after a `refresh`; return their positions."""
        packed = self._packed(len(names), values)
        records = np.empty(len(names), RECORD)
        records["name"] = names
        records["row"] = crc32c_blocks(packed, self.stride)
        records["own"] = _own_sums(records)
        first = self._count
        begin = first * RECORD.itemsize
        if os.fstat(self._files.log).st_size != begin:
            os.ftruncate(self._files.log, begin)  # a process was killed while it wrote a record
        end = first + len(names)
        if os.fstat(self._files.rows).st_size < end * self.stride:
            os.ftruncate(self._files.rows, max(self._expected, 2 * end) * self.stride)
        _write(self._files.rows, packed, first * self.stride)
        try:
            _write(self._files.log, records.view(np.uint8), begin)
        except OSError:
            os.ftruncate(self._files.log, begin)
            raise
        self._add(records, whole=True)
        return np.arange(first, end)

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
        lines.join_rows([piece for piece in pieces if piece[1]], packed)
        return packed

    def flush(self) -> None:
        """Force the rows to disk, and then their records."""
        os.fsync(self._files.rows)
        os.fsync(self._files.log)


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
    result = []
    while start < stop and (piece := os.pread(number, stop - start, start)):
        result.append(piece)
        start += len(piece)
    data = b"".join(result)
    return data[: len(data) - len(data) % RECORD.itemsize]


def _write(number: int, array: npt.NDArray[np.uint8], place: int) -> None:
    data = array.reshape(-1).data
    while data:
        written = os.pwrite(number, data, place)
        data, place = data[written:], place + written


def _close(*numbers: int) -> None:
    for number in numbers:
        os.close(number)
