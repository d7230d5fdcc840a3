"""Failures that are known and not mended yet: which cases they are of, and their cause."""

from __future__ import annotations

from collections.abc import Callable

from combinations.axes import Case

KNOWN: dict[str, Callable[[Case], bool]] = {
    "ranks tell Keras' callbacks of a batch before a pipe has brought it": lambda c: (
        c.data == "fifo" and c.is_compiled and c.ranks > 1 and c.callbacks == "own"
    ),
}


def cause_of(case: Case) -> str | None:
    """Why a case fails; None where it must not."""
    if case.refused_by:
        return None
    return next((cause for cause, is_of in KNOWN.items() if is_of(case)), None)
