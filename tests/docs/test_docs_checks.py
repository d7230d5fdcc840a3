"""The page of each check: its code runs, and where it says so both versions give the same bits."""

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from test_docs_blocks import DOCS, ROOT, blocks

from flatout.cures.install import CURES
from flatout.doctor.checks import CHECKS, RANK_CHECKS
from flatout.doctor.finding import docs_page
from flatout.recipe import Recipe
from flatout.recipe.overrides import apply

CHECKED = [check.name for check in (*CHECKS, *RANK_CHECKS)]
PAGES = {page.stem: page for page in sorted((DOCS / "checks").glob("*.md"))}
INDEX = PAGES.pop("index")
AS_IT_IS, CURED = "as it is", "cured"


def code_of(page):
    return {block.title: block.body for block in blocks(page) if block.language == "python"}


def facts(page):
    """What the rows below the page's first sentences say, by column: kinds, fields, results."""
    rows = re.findall(r"^\|(?! kind|---)(.*)\|$", page.read_text(), re.MULTILINE)
    columns = zip(*([cell.strip() for cell in row.split("|")] for row in rows), strict=True)
    return [", ".join(dict.fromkeys(column)) for column in columns]


def test_every_check_has_a_page_and_every_page_a_check():
    assert sorted(PAGES) == sorted(CHECKED)


def test_the_list_of_checks_is_up_to_date():
    command = [sys.executable, str(DOCS / "checks_index.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("name", CHECKED)
def test_a_page_has_its_parts(name):
    text = PAGES[name].read_text(encoding="utf-8")
    assert text.startswith(f"# {name}\n")
    heads = re.findall(r"^## (.*)", text, re.MULTILINE)
    assert [heads[0], *heads[2:]] == ["How it shows", "The cure", "When to leave it alone"]
    assert heads[1].startswith("Why it ")
    for title, code in code_of(PAGES[name]).items():
        assert title in (AS_IT_IS, CURED)
        compile(code, f"{name}: {title}", "exec")
    assert len(re.findall(r"^```\w", text, re.MULTILINE)) == len(blocks(PAGES[name]))


@pytest.mark.parametrize("name", CHECKED)
def test_what_a_page_sets_is_what_its_row_says(name):
    settings = re.findall(r"--set (\S+)", PAGES[name].read_text(encoding="utf-8"))
    apply(Recipe(), settings)  # refuses what is no field, or no value of it
    named = {field for field, _, _ in (setting.partition("=") for setting in settings)}
    assert named == set(re.findall(r"`([^`]+)`", facts(PAGES[name])[1]))
    # What a Recipe says where a Trainer or Loop trains, a page has to say so.
    assert named <= {*CURES} or "flatout.Trainer" in PAGES[name].read_text(encoding="utf-8")


def test_a_finding_names_its_page_where_the_documentation_lies():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert docs_page("starvation") == f"{project['urls']['Documentation']}/checks/starvation/"
    site = re.search(r"^site_url: (.*)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert docs_page("starvation") == f"{site[1]}checks/starvation/"


@pytest.mark.slow
def test_the_code_of_every_page_runs_and_keeps_the_bits_where_it_says_so(tmp_path):
    ((_, before_all),) = code_of(INDEX).items()
    pieces = [("nothing", before_all)] + [
        (f"{name}: {title}", before_all + code)
        for name, page in PAGES.items()
        for title, code in code_of(page).items()
    ]
    # What torchrun tells a rank: a single one.
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("run_snippets.py"))],
        input=json.dumps(pieces),
        cwd=tmp_path,
        env=os.environ | alone | {"TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        text=True,
        timeout=240,
        check=True,
    )
    told = json.loads(done.stdout)
    assert {name: one["error"] for name, one in told.items() if "error" in one} == {}
    weights = {name: one["weights"] for name, one in told.items()}
    same = [
        name
        for name, page in PAGES.items()
        if facts(page)[2].startswith("bit-identical")
        and "changes learning" not in facts(page)[2]
        and AS_IT_IS in code_of(page)
    ]
    assert len(same) > 10
    untrained = weights["nothing"]
    for name in same:
        as_it_is, cured = weights[f"{name}: {AS_IT_IS}"], weights[f"{name}: {CURED}"]
        assert as_it_is == cured != untrained, name
