"""Which lines a thread runs, looked at about a hundred times a second by a native thread beside it.

A thread of Python's own would see the lines that let other threads run, and few others. Where the
extension is missing, or does not find the frames of this Python, nothing samples the lines.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from flatout.kernels.clock import Clock

if TYPE_CHECKING:
    from flatout.kernels._stacks import Stacks


def stacks_of(clock: Clock) -> Stacks | None:
    """What looks at the calling thread, the one of this clock; None where that cannot be done."""
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
