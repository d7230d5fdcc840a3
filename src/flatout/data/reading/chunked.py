"""Rows by index from formats that are decoded in chunks."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from threading import Lock
from typing import Any

import numpy as np
import numpy.typing as npt

from flatout.data.reading.block import Block, Numbers, Ragged, Values, offsets_of, take, take_values
from flatout.data.reading.buffers import Buffers
from flatout.data.reading.files import File
from flatout.data.reading.origins import Chunks, Rows
from flatout.errors import DataError


class ChunkedRows(Rows):
    """Rows of any Chunks. Follows `flatout.data.reading.origins.Rows`.

    The chunks used last stay decoded, within a budget of memory. A chunk that several threads need
    is decoded once, by the first thread; the other threads wait for it.
    """

    random = False

    def __init__(self, chunks: Chunks, *, budget: int = 1 << 28) -> None:
        self.chunks = chunks
        self.schema = chunks.schema
        self.starts = offsets_of(chunks.sizes)
        self.rows = int(self.starts[-1])
        if self.rows == 0:
            raise DataError("there are no rows: expected at least 1", where=chunks.describe())
        self._budget = budget
        self._forget()

    def _forget(self) -> None:
        self._decoded: OrderedDict[int, Future[Block]] = OrderedDict()
        self._bytes: dict[int, int] = {}
        self._lock = Lock()

    def __getstate__(self) -> dict[str, Any]:
        # A copy in another process decodes chunks itself.
        return {
            name: value
            for name, value in self.__dict__.items()
            if name not in ("_decoded", "_bytes", "_lock")
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget()

    @property
    def digest(self) -> str:
        return self.chunks.digest

    @property
    def files(self) -> Sequence[File]:
        files: Sequence[File] = getattr(self.chunks, "files", ())
        return files

    def take(self, numbers: Numbers, buffers: Buffers) -> Block:
        if len(numbers) == 0:
            return take(self._chunk(0, buffers), numbers)
        columns: dict[str, Values] = {}
        ragged: dict[str, list[Ragged]] = {}
        all_places = []
        # Copy rows chunk by chunk, so that only one chunk has to be in memory.
        for chunk, places in self._by_chunk(numbers):
            block = self._chunk(chunk, buffers)
            own = numbers[places] - self.starts[chunk]
            for name, values in block.columns.items():
                if isinstance(values, Ragged):
                    ragged.setdefault(name, []).append(_rows_of(values, own))
                    continue
                if name not in columns:
                    shape = (len(numbers), *values.shape[1:])
                    columns[name] = buffers.empty(shape, values.dtype)
                _copy(values, own, columns[name], places)
            all_places.append(places)
        for name, parts in ragged.items():
            columns[name] = _joined(parts, np.concatenate(all_places))
        return Block(columns, numbers)

    def _by_chunk(self, numbers: Numbers) -> Iterator[tuple[int, Numbers]]:
        if numbers.min() < 0 or numbers.max() >= self.rows:
            raise IndexError(f"expected rows from 0 to {self.rows - 1:,}")
        owner = np.searchsorted(self.starts, numbers, side="right") - 1
        by_owner = np.argsort(owner, kind="stable")
        cuts = np.flatnonzero(np.diff(owner[by_owner])) + 1
        for places in np.split(by_owner, cuts):
            yield int(owner[places[0]]), places

    def _chunk(self, chunk: int, buffers: Buffers) -> Block:
        with self._lock:
            future = self._decoded.get(chunk)
            is_mine = future is None
            if future is None:
                future = self._decoded[chunk] = Future()
            self._decoded.move_to_end(chunk)
        if is_mine:
            self._decode(chunk, future, buffers)
        return future.result()

    def _decode(self, chunk: int, future: Future[Block], buffers: Buffers) -> None:
        try:
            block = self.chunks.read(chunk, buffers)
        except BaseException as error:
            # After a failure, the next caller decodes the chunk again.
            with self._lock:
                del self._decoded[chunk]
            future.set_exception(error)
            return
        future.set_result(block)
        with self._lock:
            self._bytes[chunk] = _bytes_of(block)
            while sum(self._bytes.values()) > self._budget and len(self._bytes) > 1:
                oldest = next(number for number in self._decoded if number in self._bytes)
                del self._decoded[oldest], self._bytes[oldest]

    def where(self, number: int) -> str:
        return self.chunks.where(number)

    def describe(self) -> str:
        return self.chunks.describe()

    def notes(self) -> list[str]:
        return self.chunks.notes()


def _copy(values: npt.NDArray[Any], own: Numbers, out: Any, places: Numbers) -> None:
    if (np.diff(own) == 1).all() and (np.diff(places) == 1).all():
        out[places[0] : places[-1] + 1] = values[own[0] : own[-1] + 1]
    else:
        out[places] = values[own]


def _rows_of(values: Ragged, own: Numbers) -> Ragged:
    taken = take_values(values, own)
    assert isinstance(taken, Ragged)
    return taken


def _joined(parts: list[Ragged], places: Numbers) -> Ragged:
    lengths = np.concatenate([np.diff(part.offsets) for part in parts])
    joined = Ragged(np.concatenate([part.values for part in parts]), offsets_of(lengths))
    if (np.diff(places) == 1).all():
        return joined
    return _rows_of(joined, np.argsort(places))


def _bytes_of(block: Block) -> int:
    total = block.numbers.nbytes
    for values in block.columns.values():
        if isinstance(values, Ragged):
            total += values.values.nbytes + values.offsets.nbytes
        else:
            total += values.nbytes
    return total
