"""The clock of a training loop, and the hooks that look at it: in C, or Python fallbacks.

The clock always runs for one of the lanes and keeps the durations of the latest steps. Hooks read
it several times in each step. The hooks in C (`_clock_hooks.h`) have no fallback here: behind each
of them stands the hook in Python that it takes the place of.
"""

from __future__ import annotations

import sys
from contextlib import suppress

from flatout.kernels import absent
from flatout.kernels.clock_fallback import Called as Called
from flatout.kernels.clock_fallback import Clock as Clock
from flatout.kernels.clock_fallback import Loaded as Loaded

# Elsewhere the system's steady clock is another one than time.perf_counter's.
if sys.platform == "linux" and absent.WANTED:
    with suppress(ImportError):
        from flatout.kernels._clock import Called as Called  # type: ignore[assignment]
        from flatout.kernels._clock import Clock as Clock  # type: ignore[assignment]
        from flatout.kernels._clock import Loaded as Loaded  # type: ignore[assignment]


def available() -> bool:
    """Whether the C extension runs; otherwise its Python fallback does."""
    return Clock.__module__ == "flatout.kernels._clock"
