"""The row of facts on a check's page is what the check says."""

from dataclasses import replace
from pathlib import Path

import pytest
from test_doctor_checks import TABLE

from flatout.doctor.checks import NoSignal

PAGES = Path(__file__).parents[2] / "docs" / "checks"


def on_a_gpu(check, sick):
    """What the check finds in the same job on a GPU: some cures are worth it only there."""
    if isinstance(sick, list):
        return []
    try:
        return check.look(replace(sick, device="cuda:0", gpus=["L4"]))
    except NoSignal:
        return []


@pytest.mark.parametrize(("check", "row"), TABLE)
def test_the_page_says_what_the_finding_says(check, row):
    (found,) = check.look(row.sick)
    numbers = ", ".join(map(str, check.numbers))
    fields = {field: None for one in (found, *on_a_gpu(check, row.sick)) for field in one.recipe}
    lines = (PAGES / f"{check.name}.md").read_text(encoding="utf-8").splitlines()
    (facts,) = [line for line in lines if line.startswith(f"| {found.kind} |")]
    kind, pitfalls, recipe, result = (cell.strip() for cell in facts.strip("|").split("|"))
    assert (kind, pitfalls) == (found.kind, numbers)
    assert recipe == ", ".join(f"`{field}`" for field in fields)
    assert result.partition(";")[0] == found.parity
