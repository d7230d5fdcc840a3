"""Rows of arrays that lie in files as they do in memory."""

from __future__ import annotations

import math
import mmap
import zlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import cached_property
from threading import Lock
from typing import Any

import numpy as np
import numpy.typing as npt

from flatout.data.block import Block, Numbers, Values, offsets_of
from flatout.data.buffers import Buffers
from flatout.data.files import File, files_words
from flatout.data.indexed import files_digest
from flatout.data.origins import Rows
from flatout.data.schema import Column, Schema
from flatout.data.sources.arrays_in_files import MemberChecksum, Part, StoredArray, convert
from flatout.errors import DataError
from flatout.kernels import gather_rows

_MOST_MAPS = 256
# Bytes in one call of crc32.
_PIECE = 16 << 20


class MappedRows(Rows):
    """Rows of arrays in files, mapped into memory. Follows `flatout.data.origins.Rows`.

    A file that changes or shrinks is found before its memory is touched. (Where one shrinks at the
    very moment in which a batch is copied out of it, the system ends the process.)

    Attributes:
        file_rows: where each part's rows begin, and at last where they end.
    """

    random = True

    def __init__(
        self,
        kind: str,
        parts: Sequence[Part],
        schema: Schema,
        unpack: Callable[[StoredArray], npt.NDArray[Any]],
    ) -> None:
        self.schema = schema
        self._kind = kind
        self._parts = list(parts)
        self._unpack = unpack
        self._compared: set[tuple[File, MemberChecksum]] = set()
        self._used = [column for column in schema.columns if column.role != "unused"]
        self._forget()
        sizes = [next(iter(part.values())).shape[0] for part in parts]
        self.file_rows = offsets_of(sizes)
        self.rows = int(self.file_rows[-1])
        self._files = [list(dict.fromkeys(place.file for place in part.values())) for part in parts]
        if self.rows == 0:
            raise DataError("the arrays hold no rows", where=self._files[0][0].name)

    def _forget(self) -> None:
        self._maps: OrderedDict[File, mmap.mmap] = OrderedDict()
        self._unpacked: dict[StoredArray, npt.NDArray[Any]] = {}
        self._lock = Lock()
        self._compares = Lock()

    def __getstate__(self) -> dict[str, Any]:
        # Another process maps for itself.
        own = ("_maps", "_unpacked", "_lock", "_compares")
        return {name: value for name, value in self.__dict__.items() if name not in own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget()

    @property
    def files(self) -> list[File]:
        return list(dict.fromkeys(file for files in self._files for file in files))

    @cached_property
    def digest(self) -> str:
        """Over the files' sizes, their first and last bytes, the arrays' names and the schema."""
        names = [f"{name} {place.name}" for part in self._parts for name, place in part.items()]
        return files_digest(self.files, *names, self.schema.dumps())

    def take(self, numbers: Numbers, buffers: Buffers) -> Block:
        if len(numbers) and (numbers.min() < 0 or numbers.max() >= self.rows):
            raise IndexError(f"expected rows from 0 to {self.rows - 1:,}")
        numbers = np.ascontiguousarray(numbers, np.int64)
        columns: dict[str, Values] = {
            column.name: buffers.empty((len(numbers), *column.shape), column.numpy_dtype)
            for column in self._used
        }
        owner = np.searchsorted(self.file_rows, numbers, side="right") - 1
        for at in np.unique(owner).tolist():
            for file in self._files[at]:
                file.check_unchanged()
            places = np.flatnonzero(owner == at)
            own = numbers[places] - self.file_rows[at]
            whole = len(places) == len(numbers)
            for column in self._used:
                out: Any = columns[column.name]
                if whole:
                    self._gather(at, column, own, out)
                else:
                    part = buffers.empty((len(own), *column.shape), column.numpy_dtype)
                    self._gather(at, column, own, part)
                    out[places] = part
        return Block(columns, numbers)

    def _gather(self, at: int, column: Column, own: Numbers, out: npt.NDArray[Any]) -> None:
        place = self._parts[at][column.name]
        array = self._array(place)
        self._check(place)
        if array.dtype == out.dtype and array.flags.c_contiguous:
            gather_rows(array, own, out)
        else:
            convert(array[own], out, place)

    def _array(self, place: StoredArray) -> npt.NDArray[Any]:
        if place.offset is None:
            with self._lock:
                if place not in self._unpacked:
                    self._unpacked[place] = self._unpack(place)
                return self._unpacked[place]
        count = math.prod(place.shape)
        if count == 0:
            return np.empty(place.shape, place.dtype)
        try:
            flat = np.frombuffer(self._map(place.file), place.dtype, count, place.offset)
        except (OSError, ValueError) as error:
            raise DataError(f"the file cannot be mapped: {error}", where=place.where) from error
        return flat.reshape(place.shape[::-1]).T if place.fortran else flat.reshape(place.shape)

    def _check(self, place: StoredArray) -> None:
        if place.checksum is not None:
            self._compare(place, place.checksum)

    def _compare(self, place: StoredArray, wanted: MemberChecksum) -> None:
        """Compare the whole array with its checksum, once, before a row of it is used."""
        with self._compares:
            if (place.file, wanted) in self._compared:
                return
            crc, view = 0, memoryview(self._map(place.file))
            for start in range(wanted.start, wanted.stop, _PIECE):
                crc = zlib.crc32(view[start : min(wanted.stop, start + _PIECE)], crc)
            if crc != wanted.crc:
                raise DataError(
                    f"the array is damaged: its CRC-32 is {crc:08x}, and the archive says "
                    f"{wanted.crc:08x}",
                    where=place.where,
                    do="write the file again, or fetch it again",
                )
            self._compared.add((place.file, wanted))

    def _map(self, file: File) -> mmap.mmap:
        with self._lock:
            if file not in self._maps:
                with open(file.path, "rb") as opened:
                    self._maps[file] = mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ)
                # A map holds a descriptor. One that is let go lives on while arrays show it.
                while len(self._maps) > _MOST_MAPS:
                    self._maps.popitem(last=False)
            self._maps.move_to_end(file)
            return self._maps[file]

    def targets(self) -> npt.NDArray[Any] | None:
        targets = self.schema.of_role("target")
        if len(targets) != 1 or targets[0].shape:
            return None
        for file in self.files:
            file.check_unchanged()
        out = np.empty(self.rows, targets[0].numpy_dtype)
        for at, part in enumerate(self._parts):
            own = out[self.file_rows[at] : self.file_rows[at + 1]]
            self._check(part[targets[0].name])
            convert(self._array(part[targets[0].name]), own, part[targets[0].name])
        return out

    def where(self, number: int) -> str:
        at = int(np.searchsorted(self.file_rows, number, side="right")) - 1
        return f"{self._files[at][0].name}: row {number - self.file_rows[at]:,}"

    def describe(self) -> str:
        return files_words(self.files, self._kind, self.rows)

    def notes(self) -> list[str]:
        places = [place for part in self._parts for place in part.values()]
        scattered = [place.where for place in places if place.fortran and len(place.shape) > 1]
        packed = [place.where for place in places if place.offset is None]
        notes = []
        if scattered:
            notes.append(
                f"{scattered[0]} is in Fortran order, which scatters each row over the file: "
                "save numpy.ascontiguousarray(array) instead"
            )
        if packed:
            notes.append(
                f"{packed[0]} is packed, so it is held in memory: save it with numpy.savez "
                "instead of savez_compressed to have it mapped"
            )
        return notes
