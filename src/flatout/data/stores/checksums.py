"""Checksums of a file's blocks, compared when the blocks are first read."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from flatout.errors import DataError
from flatout.kernels import crc32c, crc32c_blocks

# Bytes of a block: one to a few times the bytes that the system reads from disk at a time.
BLOCK = 1 << 18
# Maximum number of bytes that are read and compared at once.
_PIECE = 16 << 20
_BLANK = "0" * 8


class Checksums(NamedTuple):
    """The CRC-32C of each block of a file.

    Attributes:
        size: size of the file in bytes.
        block: size of each block in bytes, a power of two; the last may be shorter.
        crc32c: checksum of each block.
    """

    size: int
    block: int
    crc32c: npt.NDArray[np.int64]

    @classmethod
    def of(cls, path: str | os.PathLike[str], block: int = BLOCK) -> Checksums:
        result, size = [np.empty(0, np.int64)], 0
        with open(path, "rb", buffering=0) as file:
            # A raw read may return less than a whole number of blocks.
            while len(piece := _read(file.fileno(), size, _PIECE)):
                result.append(crc32c_blocks(piece, block))
                size += len(piece)
        return cls(size, block, np.concatenate(result))

    def words(self) -> dict[str, Any]:
        return {"size": self.size, "block": self.block, "crc32c": self.crc32c.tolist()}

    @classmethod
    def from_words(cls, words: Any) -> Checksums:
        size, block, crc32c = words["size"], words["block"], words["crc32c"]
        if not isinstance(size, int) or not isinstance(block, int) or not isinstance(crc32c, list):
            raise ValueError("expected a size, a size of blocks, and a list of checksums")
        if size < 0 or block < 1 or block & (block - 1) or len(crc32c) != -(-size // block):
            raise ValueError("its sizes and checksums do not fit together")
        return cls(size, block, np.array(crc32c, np.int64).reshape(len(crc32c)))


class Verified:
    """A file whose blocks are compared with their checksums. Several threads may call at once.

    Args:
        name: name of the file, for messages.
        sums: checksums of the file's blocks.
        do: advice for the user if a block differs.
    """

    def __init__(self, name: str, sums: Checksums, do: str) -> None:
        self._name, self._sums, self._do = name, sums, do
        self._compared = np.zeros(len(sums.crc32c), bool)
        self._shift = sums.block.bit_length() - 1
        self.done = not len(self._compared)

    def check(
        self,
        starts: npt.NDArray[np.int64],
        stops: npt.NDArray[np.int64],
        read: Callable[[int, int], Any],
    ) -> None:
        """Compare the blocks that contain some ranges, except blocks compared before.

        Args:
            starts: starts of the ranges, in bytes, each within the file; int64 of shape (ranges,).
            stops: ends of the ranges, each after its start.
            read: returns the file's bytes between two byte offsets.

        Raises:
            DataError: a block differs. The error names the first such block.
        """
        if self.done or not len(starts):
            return
        first, last = starts >> self._shift, (stops - 1) >> self._shift
        if self._compared[first].all() and self._compared[last].all() and (last - first).max() < 2:
            return
        for begin, end in self._missing(first, last):
            low, high = begin << self._shift, min(end << self._shift, self._sums.size)
            self._compare(begin, end, read(low, high))
        self.done = bool(self._compared.all())

    def _missing(
        self, first: npt.NDArray[np.int64], last: npt.NDArray[np.int64]
    ) -> list[tuple[int, int]]:
        counts = last - first + 1
        within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        blocks = np.unique(np.repeat(first, counts) + within)
        blocks = blocks[~self._compared[blocks]]
        most = max(1, _PIECE >> self._shift)
        return [
            (int(run[at]), int(run[min(at + most, len(run)) - 1]) + 1)
            for run in np.split(blocks, np.flatnonzero(np.diff(blocks) != 1) + 1)
            for at in range(0, len(run), most)
        ]

    def check_all(self, read: Callable[[int, int], Any]) -> None:
        if self._sums.size:
            self.check(np.array([0]), np.array([self._sums.size]), read)

    def compare(self, start: int, data: Any) -> None:
        """Compare bytes that begin with a block, even if they were compared before.

        Raises:
            DataError: a block differs. The error names the first such block.
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
        self._compared[begin:end] = True


def _read(number: int, start: int, size: int) -> bytes:
    result = []
    while size and (part := os.pread(number, size, start)):
        result.append(part)
        start, size = start + len(part), size - len(part)
    return result[0] if len(result) == 1 else b"".join(result)


# ---- JSON that carries its own checksum ----


def sealed(words: dict[str, Any]) -> str:
    """Return an object as JSON text whose "checksum" is the CRC-32C of the text with checksum 0."""
    text = json.dumps({"checksum": _BLANK, **words})
    return text.replace(_BLANK, f"{crc32c(text.encode()):08x}", 1)


def unsealed(text: str) -> dict[str, Any]:
    try:
        words = json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if not isinstance(words, dict):
        raise ValueError("it holds no object")
    checksum = words.get("checksum")
    if checksum is None:
        raise ValueError("its own checksum is missing")
    blank = text.replace(f'"checksum": "{checksum}"', f'"checksum": "{_BLANK}"', 1)
    if f"{crc32c(blank.encode()):08x}" != checksum:
        raise ValueError("it is damaged: it differs from its own checksum")
    return words
