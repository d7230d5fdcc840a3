"""Random numbers: the order of samples, seeds of batches, draws, and states of the generators.

Orders, seeds and draws depend on (seed, epoch, step or sample) alone. The generators are torch's
CPU generator and the global generators of Python and numpy, which datasets, samplers and
augmentations use.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from flatout.data.reading.block import Numbers

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


def random_state() -> dict[str, Any]:
    """Return the states of the three generators: tensors, arrays, numbers and words."""
    return {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=False),
    }


def set_random_state(state: dict[str, Any]) -> None:
    """Restore the result of `random_state`, even after JSON has made lists of its tuples."""
    torch.set_rng_state(state["torch"])
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    np.random.set_state(state["numpy"])


def seed_all(seed: int) -> None:
    """Seed the three generators, but no device's: `torch.manual_seed` would seed the GPUs too."""
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed the three generators within the block, and restore their states after it."""
    before = random_state()
    seed_all(seed)
    try:
        yield
    finally:
        set_random_state(before)


def same_state(a: Any, b: Any) -> bool:
    """Return whether two states are equal."""
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, np.ndarray):
        return bool(np.array_equal(a, b))
    if isinstance(a, dict):
        return all(same_state(a[key], b[key]) for key in a)
    if isinstance(a, (tuple, list)):
        return all(same_state(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


# Number of values of a 64-bit word.
_WORD = 2**64


def order(n: int, seed: int, epoch: int, shuffle: bool = True) -> npt.NDArray[np.int64]:
    """Return the order of the samples 0 to n-1 in an epoch.

    The order is the same with every version of Python, numpy and torch, on every machine, and with
    any number of workers. So a run can resume in the middle of an epoch from (seed, epoch, step).

    Each sample draws a 64-bit word from Philox4x64-10 (Salmon et al., "Parallel random numbers: as
    easy as 1, 2, 3", 2011), keyed by (seed, epoch), counter 0. numpy guarantees that the words of a
    bit generator never change; it does not guarantee this for `permutation`. Samples are sorted by
    their words, whose lowest bits are replaced by the sample's number. So equal words keep their
    order, as in a stable sort, and sorting plain words is seven times faster than a stable argsort.
    """
    if not shuffle:
        return np.arange(n, dtype=np.int64)
    key = np.array([seed % _WORD, epoch % _WORD], dtype=np.uint64)
    words = np.random.Philox(key=key).random_raw(n)
    low = np.uint64((1 << max(0, n - 1).bit_length()) - 1)
    words &= ~low
    words |= np.arange(n, dtype=np.uint64)
    words.sort()
    words &= low
    return words.view(np.int64)


def batch_seed(seed: int, epoch: int, step: int) -> int:
    """Return the 64-bit seed of all random draws while batch `step` of an epoch is made.

    The seed comes from the same Philox streams as `order`, at counters that `order` never uses. So
    the seed also depends on its arguments alone, with every version and any number of workers.
    """
    counter = np.array([step % _WORD, 0, 0, 1], dtype=np.uint64)
    key = np.array([seed % _WORD, epoch % _WORD], dtype=np.uint64)
    return int(np.random.Philox(counter=counter, key=key).random_raw())
