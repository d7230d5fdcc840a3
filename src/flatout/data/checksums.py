"""Checksums of a file, block by block, and which blocks were compared with them in this run.

A block is compared when bytes of it are first read, and not again while the process runs: what was
compared stands on a board of marks, which the processes that make batches share.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Callable
from threading import Condition, Lock
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from flatout.errors import DataError
from flatout.kernels import crc32c, crc32c_blocks

# As many bytes as the system fetches from a disk at once for a random read, or a few times more.
BLOCK = 1 << 18
# Bytes that a thread compares in one go.
_PIECE = 16 << 20
_ROOM = 64 << 20
_BLANK = "0" * 8

Marks: TypeAlias = npt.NDArray[np.uint8]
# What identifies a file's present content: path, size, when it was last written.
Key: TypeAlias = tuple[str, int, int]


class Checksums(NamedTuple):
    """The CRC-32C of each block of a file.

    Attributes:
        size: of the file, in bytes.
        block: bytes of each block, a power of two; the last may be shorter.
        crc32c: int64 of shape (blocks,).
    """

    size: int
    block: int
    crc32c: npt.NDArray[np.int64]

    @classmethod
    def of(cls, path: str | os.PathLike[str]) -> Checksums:
        """Those of a file as it is now."""
        result, size = [np.empty(0, np.int64)], 0
        with open(path, "rb", buffering=0) as file:
            # A raw read may give less than a whole number of blocks.
            while len(piece := _read(file.fileno(), size, _PIECE)):
                result.append(crc32c_blocks(piece, BLOCK))
                size += len(piece)
        return cls(size, BLOCK, np.concatenate(result))

    def words(self) -> dict[str, Any]:
        """As JSON holds them."""
        return {"size": self.size, "block": self.block, "crc32c": self.crc32c.tolist()}

    @classmethod
    def from_words(cls, words: Any) -> Checksums:
        """From what JSON holds."""
        size, block, crc32c = words["size"], words["block"], words["crc32c"]
        if not isinstance(size, int) or not isinstance(block, int) or not isinstance(crc32c, list):
            raise ValueError("expected a size, a size of blocks, and a list of checksums")
        if size < 0 or block < 1 or block & (block - 1) or len(crc32c) != -(-size // block):
            raise ValueError("its sizes and checksums do not fit together")
        return cls(size, block, np.array(crc32c, np.int64).reshape(len(crc32c)))


class Verified:
    """A file whose blocks are compared with their checksums. Several threads may call at once.

    Args:
        name: of the file, for people.
        sums: what it should have.
        key: of the file as it is now.
        do: what to do where a block differs.
    """

    def __init__(self, name: str, sums: Checksums, key: Key, do: str) -> None:
        self._name, self._sums, self._do = name, sums, do
        self._marks = marks_of(key, len(sums.crc32c))
        self._shift = sums.block.bit_length() - 1
        self._busy = np.zeros(len(self._marks), bool)
        self._turn = Condition()
        self._done_to = 0  # before this block all were compared
        self._look_whether_done()

    def check(
        self,
        starts: npt.NDArray[np.int64],
        stops: npt.NDArray[np.int64],
        read: Callable[[int, int], Any],
    ) -> None:
        """Compare the blocks in which some ranges lie, those that were not before.

        Args:
            starts: of the ranges, in bytes, each within the file; int64 of shape (ranges,).
            stops: of the ranges, each beyond its start.
            read: gives the file's bytes from one place to another.

        Raises:
            DataError: naming the first block that differs.
        """
        if self.done or not len(starts):
            return
        first, last = starts >> self._shift, (stops - 1) >> self._shift
        if self._marks[first].all() and self._marks[last].all() and (last - first).max() < 2:
            return
        runs = self._missing(first, last)
        for waits in (False, True):  # what other threads compare is waited for at the end
            for run in runs:
                while (own := self._claim(*run, waits)) is not None:
                    begin, end = own
                    try:
                        low = begin << self._shift
                        high = min(end << self._shift, self._sums.size)
                        self._compare(begin, end, read(low, high))
                    finally:
                        with self._turn:
                            self._busy[begin:end] = False
                            self._turn.notify_all()
        self._look_whether_done()

    def _missing(
        self, first: npt.NDArray[np.int64], last: npt.NDArray[np.int64]
    ) -> list[tuple[int, int]]:
        counts = last - first + 1
        within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        blocks = np.unique(np.repeat(first, counts) + within)
        blocks = blocks[self._marks[blocks] == 0]
        most = max(1, _PIECE >> self._shift)
        return [
            (int(run[at]), int(run[min(at + most, len(run)) - 1]) + 1)
            for run in np.split(blocks, np.flatnonzero(np.diff(blocks) != 1) + 1)
            for at in range(0, len(run), most)
        ]

    def _claim(self, begin: int, end: int, waits: bool) -> tuple[int, int] | None:
        with self._turn:
            while (missing := self._marks[begin:end] == 0).any():
                free = missing & ~self._busy[begin:end]
                if free.any():
                    low = int(free.argmax())
                    ends = np.flatnonzero(~free[low:])
                    high = low + int(ends[0]) if len(ends) else len(free)
                    self._busy[begin + low : begin + high] = True
                    return begin + low, begin + high
                if not waits:
                    break
                self._turn.wait()
            return None

    def _look_whether_done(self) -> None:
        start = self._done_to
        rest = self._marks.view(np.bool_)[start:]
        at = int(rest.argmin()) if len(rest) else 0
        # All of them again: another thread may have marked the block at `at` since.
        self.done = bool(rest[at:].all())
        self._done_to = start + at  # of several threads the last says it, which may be an earlier

    def check_all(self, read: Callable[[int, int], Any]) -> None:
        """Compare all blocks that were not before; as `check`."""
        if self._sums.size:
            self.check(np.array([0]), np.array([self._sums.size]), read)

    def piece(self, start: int, data: Any) -> None:
        """Compare the blocks that lie whole in some bytes, which were just read.

        Args:
            start: of the bytes in the file.
            data: C-contiguous memory with the buffer protocol.

        Raises:
            DataError: naming the first block that differs.
        """
        text = memoryview(data).cast("B")
        block, stop = self._sums.block, start + len(text)
        begin = -(-start // block)
        end = len(self._marks) if stop >= self._sums.size else stop // block
        if end > begin and not self._marks[begin:end].all():
            low, high = begin * block - start, min(end * block, self._sums.size) - start
            self._compare(begin, end, text[low:high])

    def compare(self, start: int, data: Any) -> None:
        """Compare bytes that begin with a block, whether they were compared before or not.

        Raises:
            DataError: naming the first block that differs.
        """
        begin = start >> self._shift
        self._compare(begin, begin + (len(data) + self._sums.block - 1 >> self._shift), data)

    def _compare(self, begin: int, end: int, data: Any) -> None:
        computed = crc32c_blocks(data, self._sums.block)
        wrong = np.flatnonzero(computed != self._sums.crc32c[begin:end])
        if len(wrong):
            at = begin + int(wrong[0])
            low = at * self._sums.block
            high = min(low + self._sums.block, self._sums.size)
            raise DataError(
                "the bytes are not those that were written: the checksum differs",
                where=f"{self._name}: block {at:,}, bytes {low:,} to {high - 1:,}",
                do=self._do,
            )
        self._marks[begin:end] = 1


def _read(number: int, start: int, size: int) -> bytes:
    result = []
    while size and (part := os.pread(number, size, start)):
        result.append(part)
        start, size = start + len(part), size - len(part)
    return result[0] if len(result) == 1 else b"".join(result)


def reader(number: int) -> Callable[[int, int], bytes]:
    """Gives the bytes of an open file from one place to another."""
    return lambda start, stop: _read(number, start, stop - start)


# ---- JSON that carries its own checksum ----


def sealed(words: dict[str, Any]) -> str:
    """JSON text of an object, with the CRC-32C of the text in which it is 0 as "checksum"."""
    text = json.dumps({"checksum": _BLANK, **words})
    return text.replace(_BLANK, f"{crc32c(text.encode()):08x}", 1)


def unsealed(text: str) -> dict[str, Any]:
    """The object in a text that `sealed` has made, with its checksum, or in one that has none."""
    try:
        words = json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if not isinstance(words, dict):
        raise ValueError("it holds no object")
    checksum = words.get("checksum")
    if checksum is not None:
        blank = text.replace(f'"checksum": "{checksum}"', f'"checksum": "{_BLANK}"', 1)
        if f"{crc32c(blank.encode()):08x}" != checksum:
            raise ValueError("it is damaged: it differs from its own checksum")
    return words


# ---- what was compared in this run ----


class _Board:
    """Marks of many files, in memory that other processes may map.

    Attributes:
        places: where each file's marks begin, and how many they are.
        own: whether this process gives out its places.
    """

    def __init__(self, path: str | None, places: dict[Key, tuple[int, int]]) -> None:
        self.places, self.own, self.pid, self.used = places, path is None, os.getpid(), 0
        self.path = path
        try:
            if path is None:
                self.file = os.memfd_create("flatout-verified", os.MFD_CLOEXEC)
                os.ftruncate(self.file, _ROOM)
            else:
                self.file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            self._marks = np.frombuffer(mmap.mmap(self.file, _ROOM), np.uint8)
        except (OSError, AttributeError, ValueError):
            # There is no such memory here, or the process that has it cannot be reached.
            self.file, self._marks, self.places = -1, np.zeros(0, np.uint8), {}

    def find(self, key: Key, count: int) -> Marks | None:
        start, known = self.places.get(key, (0, -1))
        return self._marks[start : start + count] if known == count else None

    def add(self, key: Key, count: int) -> Marks:
        if self.used + count > len(self._marks):
            return np.zeros(count, np.uint8)
        self.places[key] = (self.used, count)
        self.used += count
        return self._marks[self.used - count : self.used]


_boards: list[_Board] = []
_lock = Lock()


def _own_board() -> _Board:
    # What a fork has taken over is known here too, but its parent alone gives out its places.
    result = (board for board in _boards if board.own and board.pid == os.getpid())
    board = next(result, None) or _Board(None, {})
    if board not in _boards:
        _boards.append(board)
    return board


def marks_of(key: Key, count: int) -> Marks:
    """A byte for each block of a file: 1 where it was compared in this run."""
    with _lock:
        boards = (board.find(key, count) for board in _boards)
        known = next((marks for marks in boards if marks is not None), None)
        return _own_board().add(key, count) if known is None else known


def shared() -> tuple[str, dict[Key, tuple[int, int]]]:
    """What another process of this run needs to know what was compared: for `adopt`."""
    with _lock:
        board = _own_board()
        return f"/proc/{board.pid}/fd/{board.file}", dict(board.places)


def adopt(message: tuple[str, dict[Key, tuple[int, int]]]) -> None:
    """Share the marks of the process that sent `message`; without it, compare alone."""
    path, places = message
    with _lock:
        if path.startswith(f"/proc/{os.getpid()}/"):
            return
        known = next((board for board in _boards if board.path == path), None)
        if known is None:
            _boards.append(_Board(path, dict(places)))
        elif known.file >= 0:
            known.places.update(places)


def forget() -> None:
    """Begin another run, in which nothing was compared; files that are open stay as they are."""
    with _lock:
        _boards.clear()
