"""Random numbers for samples, made as hashes of (seed, epoch, sample), without a generator."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from flatout.data.reading.block import Numbers

# Number of values of a 64-bit word.
_WORD = 2**64
# SplitMix64: a counter in steps of the golden ratio, and factors that mix its bits.
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


class Draws:
    """A sequence of random numbers for each of some samples."""

    def __init__(self, numbers: Numbers, *key: int | Numbers) -> None:
        state = np.zeros(1, np.uint64)
        for part in (*key, numbers):
            state = _mixed((state ^ _word(part)) + _GOLDEN)
        self._state = state
        self.rows = len(numbers)

    def uniform(self, at: int) -> npt.NDArray[np.float64]:
        """Return number `at` of each sample's sequence: from 0, below 1; of shape (rows,)."""
        words = _mixed(self._state + np.array([at + 1], np.uint64) * _GOLDEN)
        return (words >> np.uint64(11)).astype(np.float64) * 2.0**-53

    def below(self, count: int | Numbers, at: int) -> Numbers:
        """Return an int from 0, below `count`, made from `uniform(at)`: int64 of shape (rows,)."""
        return (self.uniform(at) * count).astype(np.int64)


def _word(part: int | Numbers) -> npt.NDArray[np.uint64]:
    if isinstance(part, int):
        return np.array([part % _WORD], np.uint64)
    return part.astype(np.int64, copy=False).view(np.uint64)


def _mixed(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    words = (words ^ (words >> np.uint64(30))) * _FIRST
    words = (words ^ (words >> np.uint64(27))) * _SECOND
    return words ^ (words >> np.uint64(31))
