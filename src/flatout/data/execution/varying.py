"""Decides which samples may be stored: samples equal in every epoch, or with a few variants."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np

from flatout.data.execution.augmented import Augmented
from flatout.data.execution.samples import Costs, Fetched, Joined, Mapped, Samples
from flatout.data.execution.turns import Turns
from flatout.data.randomness import random_state, same_state, set_random_state
from flatout.data.reading.block import Block, Numbers, Ragged
from flatout.data.reading.buffers import Buffers

Changed: TypeAlias = Mapped | Augmented

_TRIED = 16
"""Number of samples made twice to detect randomness; misses a random flip once in 65,000 runs."""


def constant_part(samples: Samples, numbers: Numbers) -> tuple[Samples | None, list[Changed]]:
    """Split a chain of functions before the first random one."""
    behind: list[Changed] = []
    while isinstance(samples, Changed):
        behind.insert(0, samples)
        samples = samples.inner
    if _varies(samples, numbers):
        return None, behind
    while behind and not _varies(behind[0], numbers):
        samples = behind.pop(0)
    return samples, behind


def variants(samples: Samples, numbers: Numbers) -> int | None:
    """Return the number of different results of a sample over all epochs; None for no limit."""
    if isinstance(samples, Augmented):
        before, own = variants(samples.inner, numbers), samples.own_variants
        return None if before is None or own is None else before * own
    if isinstance(samples, Mapped):
        random = samples.wants_rng or _differs(samples, numbers)
        return None if random else variants(samples.inner, numbers)
    return None if _varies(samples, numbers) else 1


def endless(samples: Samples, numbers: Numbers) -> str:
    """Return why the results of samples are not limited, where `variants` returns None."""
    _, changed = constant_part(samples, numbers)
    for item in changed:
        if isinstance(item, Augmented) and item.own_variants is None:
            return f"{item.name} draws others in each epoch; views=K draws from K of each sample"
        if isinstance(item, Mapped) and (item.wants_rng or _differs(item, numbers)):
            return f"{item.name} is random"
    return f"{samples.name} is random"


def variant(samples: Samples, numbers: Numbers, epoch: Turns) -> Numbers:
    """Return the index of each sample's result in an epoch, where `variants` is a number."""
    variants = np.zeros(len(numbers), np.int64)
    factor = 1
    while isinstance(samples, Changed):
        if isinstance(samples, Augmented):
            assert samples.own_variants is not None
            variants += factor * samples.own_variant(numbers, epoch)
            factor *= samples.own_variants
        samples = samples.inner
    return variants


def _varies(samples: Samples, numbers: Numbers) -> bool:
    if isinstance(samples, Joined):
        starts = samples.starts
        return any(
            constant_part(part, own)[0] is not part
            for part, own in (
                (part, numbers[(numbers >= low) & (numbers < high)] - low)
                for part, low, high in zip(samples.parts, starts, starts[1:], strict=False)
            )
            if len(own)
        )
    if isinstance(samples, Augmented) or (isinstance(samples, Mapped) and samples.wants_rng):
        return True
    # Only a user's code can be random.
    return isinstance(samples, Mapped | Fetched) and _differs(samples, numbers)


def _differs(samples: Samples, numbers: Numbers) -> bool:
    places = np.unique(np.linspace(0, len(numbers) - 1, _TRIED).astype(np.int64))
    before = random_state()
    try:
        first = samples.make(numbers[places], Buffers(), 0, Costs())
        if not same_state(before, random_state()):
            return True
        # Made in the same epoch: code that depends on the epoch's index has a parameter for it.
        return not _same(first, samples.make(numbers[places], Buffers(), 0, Costs()))
    except Exception:
        return False  # an error of the user's code is reported when samples are made for use
    finally:
        set_random_state(before)


def _same(a: Block, b: Block) -> bool:
    if a.columns.keys() != b.columns.keys() or not np.array_equal(a.numbers, b.numbers):
        return False
    for name, value in a.columns.items():
        other = b.columns[name]
        pairs = [(value, other)]
        if isinstance(value, Ragged) and isinstance(other, Ragged):
            pairs = [(value.values, other.values), (value.offsets, other.offsets)]
        for left, right in pairs:
            assert isinstance(left, np.ndarray)
            if not isinstance(right, np.ndarray) or left.shape != right.shape:
                return False
            if left.tobytes() != right.tobytes():
                return False
    return True
