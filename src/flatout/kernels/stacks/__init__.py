"""The lines that a thread runs, sampled about a hundred times a second by a native thread.

A Python thread would sample mostly the lines that let other threads run. If the extension is
missing, or does not find the frames of this Python, nothing samples the lines.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from flatout.kernels.clock import Clock

if TYPE_CHECKING:
    from flatout.kernels._stacks import Stacks


def stacks_of(clock: Clock) -> Stacks | None:
    """Return a sampler of the calling thread, which must be the clock's, or None if unavailable."""
    return _called(clock)


def _called(clock: Clock) -> Stacks | None:
    return _made(clock)


def _made(clock: Clock) -> Stacks | None:
    try:
        from flatout.kernels._stacks import Stacks
    except ImportError:
        return None
    try:
        return Stacks(clock)
    except OSError:
        return None
