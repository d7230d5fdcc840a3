"""From a finding to the changes of the user's code that cure it."""

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
"""By the name of the finding, what writes its cure as a change of code."""


def propose(finding: Finding, observation: Observation) -> tuple[Edit, ...]:
    """Returns the edits that cure a finding; none where one cannot be written with certainty."""
    how = _WRITES.get(finding.name)
    if how is None:
        return ()
    try:
        edits = tuple(how(FoundAt.of(finding, observation)))
        for file, some in by_file(edits).items():
            Source.read(file).with_edits(some)  # it is Python still
    except (Unsure, FlatoutError):
        return ()
    return edits


def with_edits(finding: Finding, ranks: Sequence[Observation]) -> Finding:
    """The finding with the edits that cure it, by what the first of these ranks showed of it."""
    result = (edits for observation in ranks if (edits := propose(finding, observation)))
    return replace(finding, edits=finding.edits or next(result, ()))


def with_recipe(
    finding: Finding, recipe: Mapping[str, Any], ranks: Sequence[Observation]
) -> Finding:
    """The finding with other values in its Recipe, and with the edits that say them."""
    if recipe == finding.recipe:
        return finding
    return with_edits(replace(finding, recipe=dict(recipe), edits=()), ranks)
