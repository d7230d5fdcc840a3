"""The seeds of random numbers that Keras draws."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def keras_seeds_moved(by: int) -> Iterator[None]:
    """Add a number to the seeds that this thread draws; seed states advance as in Keras.

    Every draw on the torch backend gets its seed from the same function, which is replaced here.
    Draws with an integer as seed stay the same.

    Args:
        by: the number added to each seed, modulo 2**32.
    """
    random: Any = sys.modules.get("keras.src.backend.torch.random")
    if random is None:
        yield
        return
    from keras.random import SeedGenerator

    plain, thread = random.draw_seed, threading.get_ident()
    shift = _as_int32(by)

    def draw_seed(seed: Any) -> Any:
        drawn = plain(seed)
        if (seed is None or isinstance(seed, SeedGenerator)) and threading.get_ident() == thread:
            drawn[0] += shift  # a copy of the state
        return drawn

    random.draw_seed = draw_seed
    try:
        yield
    finally:
        random.draw_seed = plain


def _as_int32(number: int) -> int:
    return (number + 2**31) % 2**32 - 2**31
