"""Known failures: the cases that they affect, and their cause."""

from __future__ import annotations

from collections.abc import Callable

from combinations.axes import Case

KNOWN: dict[str, Callable[[Case], bool]] = {
    "ranks call Keras' callbacks for a batch before the pipe has delivered it": lambda c: (
        c.data == "fifo" and c.is_compiled and c.ranks > 1 and c.callbacks == "own"
    ),
}


def cause_of(case: Case) -> str | None:
    """Return the known cause of a case's failure; None if the case must not fail."""
    if case.refused_by:
        return None
    return next((cause for cause, is_of in KNOWN.items() if is_of(case)), None)
