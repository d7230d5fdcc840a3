"""Writes the edits of the user's code that cure a finding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from flatout.doctor.checks import CHECKS, RANK_CHECKS
from flatout.doctor.edits.code import Unsure
from flatout.doctor.edits.place import FoundAt
from flatout.doctor.edits.source import Source, by_file
from flatout.doctor.finding import Edit, Finding
from flatout.errors import FlatoutError
from flatout.observe import Observation

_WRITES = {check.name: check.edit for check in CHECKS} | {
    check.name: check.edit for check in RANK_CHECKS
}
"""Function that writes the cure as edits, by the name of the finding."""


def propose(finding: Finding, observation: Observation) -> tuple[Edit, ...]:
    """Return the edits that cure a finding; none if they cannot be written with certainty."""
    how = _WRITES.get(finding.name)
    if how is None:
        return ()
    try:
        edits = tuple(how(FoundAt.of(finding, observation)))
        for file, some in by_file(edits).items():
            Source.read(file).with_edits(some)  # raises if the result is no valid Python
    except (Unsure, FlatoutError):
        return ()
    return edits


def with_edits(finding: Finding, ranks: Sequence[Observation]) -> Finding:
    """Return the finding with the edits that cure it, from the first rank that allows them."""
    result = (edits for observation in ranks if (edits := propose(finding, observation)))
    return replace(finding, edits=finding.edits or next(result, ()))


def with_recipe(
    finding: Finding, recipe: Mapping[str, Any], ranks: Sequence[Observation]
) -> Finding:
    """Return the finding with another Recipe and the edits for that Recipe."""
    if recipe == finding.recipe:
        return finding
    return with_edits(replace(finding, recipe=dict(recipe), edits=()), ranks)
