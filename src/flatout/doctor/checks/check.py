"""The type of checks, and how they are registered."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial, wraps
from typing import Generic, NamedTuple, TypeAlias, TypeVar

from flatout.doctor.edits.place import FoundAt
from flatout.doctor.finding import Edit, Finding
from flatout.observe import Observation

Observed = TypeVar("Observed", Observation, Sequence[Observation])
Findings: TypeAlias = Iterable[Finding]
Write: TypeAlias = Callable[[FoundAt], list[Edit]]

COMPILES = "the script compiles, and this check cannot see into compiled code"
"""Reason of a NoSignal for code that torch compiles."""


class NoSignal(Exception):
    """Raised with the reason when an observation lacks the facts that a check needs."""


class Check(NamedTuple, Generic[Observed]):
    """One check, for one pitfall.

    Attributes:
        name: name of the check's file, of its page, and of its script in the corpus.
        look: returns the findings of one rank, or of all ranks of a machine in order; raises
            NoSignal.
        edit: writes the cure as changes of the user's code; None if that is not possible.
        lane: the only lane of a step that the cures change; "" if that is no single lane.
    """

    name: str
    look: Callable[[Observed], list[Finding]]
    edit: Write | None
    lane: str


CHECKS: list[Check[Observation]] = []
RANK_CHECKS: list[Check[Sequence[Observation]]] = []
"""Checks of all ranks of a machine together; also used with one rank."""


def check(
    *, edit: Write | None = None, lane: str = "", hooks: bool = False
) -> Callable[[Callable[[Observation], Findings]], Callable[[Observation], list[Finding]]]:
    """Register a function of an Observation as the check that its file is named after.

    Args:
        edit: function that writes the cure as changes of the user's code; None without one.
        lane: the only lane of a step that the cures change; "" if that is no single lane.
        hooks: True if the check needs hooks that do not see compiled code.
    """
    if not hooks:
        return partial(_register, CHECKS, edit, lane)
    return lambda look: _register(CHECKS, edit, lane, _unless_compiled(look))


def _unless_compiled(look: Callable[[Observation], Findings]) -> Callable[[Observation], Findings]:
    @wraps(look)
    def found(observation: Observation) -> Findings:
        findings = list(look(observation))
        if not findings and observation.compiles:
            raise NoSignal(COMPILES)
        return findings

    return found


def rank_check(
    *, edit: Write | None = None
) -> Callable[
    [Callable[[Sequence[Observation]], Findings]], Callable[[Sequence[Observation]], list[Finding]]
]:
    """Register a function of the Observations of all ranks as a check."""
    return partial(_register, RANK_CHECKS, edit, "")


def _register(
    checks: list[Check[Observed]],
    edit: Write | None,
    lane: str,
    look: Callable[[Observed], Findings],
) -> Callable[[Observed], list[Finding]]:
    name = look.__module__.rpartition(".")[2]

    @wraps(look)
    def named(observed: Observed) -> list[Finding]:
        return [replace(finding, name=name) for finding in look(observed)]

    checks.append(Check(name, named, edit, lane))
    return named
