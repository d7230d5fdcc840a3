"""The row of facts on a check's page is what the check says."""

from dataclasses import replace
from pathlib import Path

import pytest
from test_doctor_checks import TABLE

from flatout.doctor.checks import NoSignal

PAGES = Path(__file__).parents[2] / "docs" / "checks"
ELSEWHERE = ({"device": "cuda:0", "gpus": ["L4"]}, {"usable_cpus": 8, "runnable": 0.1})


def found_elsewhere(check, sick):
    """What it finds in the same job on a GPU, and where CPUs are free: some cures need that."""
    for there in ELSEWHERE if not isinstance(sick, list) else ():
        try:
            yield from check.look(replace(sick, **there))
        except NoSignal:
            continue


@pytest.mark.parametrize(("check", "row"), TABLE)
def test_the_page_says_what_the_finding_says(check, row):
    (found,) = check.look(row.sick)
    everywhere = [found, *found_elsewhere(check, row.sick)]
    fields = dict.fromkeys(field for one in everywhere for field in one.recipe)
    lines = (PAGES / f"{check.name}.md").read_text(encoding="utf-8").splitlines()
    (facts,) = [line for line in lines if line.startswith(f"| {found.kind} |")]
    kind, recipe, result = (cell.strip() for cell in facts.strip("|").split("|"))
    assert kind == found.kind
    assert recipe == ", ".join(f"`{field}`" for field in fields)
    assert result.partition(";")[0] == found.parity
    assert all(one.parity in result for one in everywhere)
