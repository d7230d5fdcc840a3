"""What a check is, and all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from flatout.doctor.finding import Finding
from flatout.observe import Observation


class NoSignal(Exception):
    """What a check needs was not seen, and why."""


class Check(NamedTuple):
    """One pitfall.

    Attributes:
        name: of the check, of its corpus script and of its page in the docs.
        numbers: of the pitfalls in the list of those known.
        look: gives what it finds; raises NoSignal.
    """

    name: str
    numbers: tuple[int, ...]
    look: Callable[[Observation], list[Finding]]


CHECKS: tuple[Check, ...] = ()
"""In the order in which they are told when nothing else decides."""
