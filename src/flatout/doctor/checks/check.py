"""What a check is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from flatout.doctor.finding import Finding
from flatout.observe import Observation


class NoSignal(Exception):
    """What a check needs was not seen, and why."""


class Check(NamedTuple):
    """One pitfall.

    Attributes:
        name: of the check, of its corpus script and of its section in the docs.
        numbers: of the pitfalls in the list of those known.
        look: gives what it finds in one rank; raises NoSignal.
    """

    name: str
    numbers: tuple[int, ...]
    look: Callable[[Observation], list[Finding]]


class RankCheck(NamedTuple):
    """One pitfall that shows only where several ranks stand beside one another.

    Attributes:
        name, numbers: as of a Check.
        look: gives what it finds in the ranks of one machine, in order; raises NoSignal.
    """

    name: str
    numbers: tuple[int, ...]
    look: Callable[[Sequence[Observation]], list[Finding]]
