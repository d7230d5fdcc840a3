"""States of the process's random generators: read, restored, or seeded for a while.

These are torch's CPU generator and the global generators of Python and numpy, which datasets,
samplers and augmentations use.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


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
