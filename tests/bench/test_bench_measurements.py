"""The pages of measurements, from the JSON files that benches write."""

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from results import Key, Results, finish

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "docs" / "measurements.py"
FILES = sorted((ROOT / "bench" / "results").glob("*.json"))


def run(script, *options):
    command = [sys.executable, str(script), *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.fixture
def copied(tmp_path):
    """The script and the results, in a folder where they may be changed."""
    shutil.copytree(ROOT / "bench" / "results", tmp_path / "bench" / "results")
    (tmp_path / "docs").mkdir()
    return Path(shutil.copy(SCRIPT, tmp_path / "docs"))


def test_the_pages_are_up_to_date():
    done = run(SCRIPT, "--check")
    assert (done.returncode, done.stderr) == (0, "")


def test_an_old_or_absent_page_is_noticed(copied):
    assert run(copied, "--check").returncode == 1
    assert run(copied).returncode == 0
    assert run(copied, "--check").returncode == 0
    page = copied.with_suffix(".md")
    page.write_text(page.read_text().replace("179", "178").replace("0.8", "0.9"))
    done = run(copied, "--check")
    assert done.returncode == 1
    assert "out of date" in done.stderr


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_file_names_its_run_and_has_whole_tables(file):
    found = json.loads(file.read_text(encoding="utf-8"))
    assert found["command"]
    assert found["hardware"]
    assert {"date", "commit", "machine", "remarks"} <= found.keys()
    assert found["tables"] or found["details"]
    for table in found["tables"]:
        assert {len(line) for line in table["lines"]} == {len(table["headers"])}
    assert found["keys"] == {name: key["value"] for name, key in found["details"].items()}


def test_what_a_bench_writes_is_shown_and_what_it_missed_is_said(copied):
    results = Results(
        title="A bench",
        headers=["", "us/step", ""],
        lines=[["ours", "2", ""], ["a|b", "3", ""]],
        remarks=["what else"],
        keys=[Key("good", 1.0, at_most=2), Key("slow", 3.0, at_most=2), Key("none", "absent")],
        data={"rows": []},
    )
    file = copied.parents[1] / "bench" / "results" / "trainer.json"
    finish(results, argparse.Namespace(json=str(file), check=False))
    assert run(copied).returncode == 0
    page = copied.with_suffix(".md").read_text()
    missed, _, keys = page.partition("## The keys of all benches\n")
    assert "- Overhead of a step: `slow` is 3, wanted at most 2.\n" in missed
    assert "`good`" not in missed
    assert "| Overhead of a step | `good` | 1 | at most 2 | yes |  |" in keys
    assert "|  | `slow` | 3 | at most 2 | **no** |  |" in keys
    tables = (copied.parents[1] / "bench" / "results" / "README.md").read_text()
    part = tables.partition("## Overhead of a step\n")[2].partition("\n## ")[0]
    assert "**A bench**\n\n|  | us/step |\n|---|---|\n| ours | 2 |\n| a\\|b | 3 |\n" in part
    assert "| `good` | 1 | at most 2 | yes |  |" in part
    assert "| `slow` | 3 | at most 2 | **no** |  |" in part
    assert "| `none` | not measured |  |  | absent |" in part
    assert "- what else\n" in part
    written = json.loads(file.read_text())
    assert f"Hardware: {written['hardware']}. Date: {written['date']}. " in part


def test_a_file_without_a_section_is_refused_by_name(copied):
    shutil.copy(FILES[0], copied.parents[1] / "bench" / "results" / "unknown.json")
    done = run(copied)
    assert done.returncode == 1
    assert "['unknown']" in done.stderr
