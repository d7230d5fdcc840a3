"""A verdict's cures as changes of the user's code: which are shown, which are written."""

import io
import re
import subprocess
from dataclasses import replace

import pytest
from rich.console import Console

from flatout.doctor.finding import Edit, Finding
from flatout.doctor.judge import Verdict
from flatout.doctor.prescription import Prescription, Proof
from flatout.observe import Loader, Observation, Site
from flatout.recipe import Parity
from flatout.report import changes
from flatout.report.session import Asked, _change_code

CODE = "a = 1\nb = 2\nc = 3\nd = 4\ne = 5\n"


@pytest.fixture
def path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(CODE)
    return tmp_path / "train.py"


def finding(path, name, line, after="z = 0", kind="slow", parity="bit-identical", cost_ms=1.0):
    before = CODE.splitlines()[line - 1]
    edits = (Edit(str(path), line, before, after),)
    where = f"{path}:{line}"
    return Finding(
        kind, "what", "do", name=name, where=where, cost_ms=cost_ms, parity=parity, edits=edits
    )


def verdict(*findings, seen=None):
    ranks = [seen or Observation(["train.py"])]
    return Verdict(ranks, {}, None, list(findings), [], [])


def told(what, *arguments):
    out = io.StringIO()
    what(*arguments, Console(file=out, width=200, highlight=False, markup=False))
    return out.getvalue()


def test_only_exact_cures_that_save_time_are_written_unasked(path):
    found = changes.changes_of(
        verdict(
            finding(path, "eval_missing", 1, kind="danger", parity="changes learning"),
            finding(path, "collect", 2, after=""),
            finding(path, "fused", 3, parity="rounding"),
            finding(path, "saved", 4, kind="note", cost_ms=None),
            finding(path, "cheap", 5, kind="note"),
        )
    )
    assert [change.finding.name for change in found.made] == [
        *("eval_missing", "collect", "fused", "saved")
    ]
    words = told(changes.write, found, Parity.EXACT)
    assert path.read_text() == "a = 1\nc = 3\nd = 4\ne = 5\n"
    assert "changed 1 file:\n  train.py:2 collect (bit-identical)\nundo  patch -d " in words
    assert "not made: train.py:1 eval_missing (changes learning): it changes learning" in words
    assert "not made: train.py:3 fused (rounding): it needs your word: --allow tolerant" in words
    assert "not made: train.py:4 saved (bit-identical): it saves no time" in words
    undo = re.search(r"undo  (.*)", words)[1]
    subprocess.run(undo, shell=True, check=True, capture_output=True)
    assert path.read_text() == CODE
    wider = told(changes.write, found, Parity.REDRAWN)
    assert "  train.py:3 fused (rounding)\n" in wider
    assert path.read_text() == "a = 1\nz = 0\nd = 4\ne = 5\n"


def test_the_diff_has_them_all_and_says_which_do_not_go_together(path, capfdbinary):
    found = changes.changes_of(
        verdict(
            finding(path, "eval_missing", 1, kind="danger", parity="changes learning"),
            finding(path, "one", 2),
            finding(path, "two", 2, after="y = 0"),
        )
    )
    words = told(changes.show, found)
    assert "train.py:1 eval_missing (changes learning): do\ntrain.py:2 one (bit-ide" in words
    assert "not made: train.py:2 two (bit-identical): two edits change the same words" in words
    diff = capfdbinary.readouterr().out
    subprocess.run(["patch", "-p1"], input=diff, check=True, capture_output=True, cwd=path.parent)
    assert path.read_text() == "z = 0\nz = 0\nc = 3\nd = 4\ne = 5\n"


def test_what_trials_gave_decides(path):
    slow = finding(path, "one", 1), finding(path, "two", 2, parity="redrawn")
    proofs = [
        Proof(("one",), "one", outcome="left alone"),
        Proof(("two",), "two", outcome="prescribed", parity="bit-identical"),
    ]
    found = changes.changes_of(verdict(*slow), Prescription(proofs))
    assert [str(change) for change in found.made] == ["train.py:2 two (bit-identical)"]


def test_the_value_that_trials_found_is_the_one_that_is_written(path):
    path.write_text("loader = DataLoader(data)\nfor x in loader:\n    pass\n")
    site = Site(str(path), 2)
    seen = Observation(["train.py"], loaders=[Loader("torch.DataLoader", site)])
    edits = (Edit(str(path), 1, "loader = DataLoader(data)", "loader = DataLoader(data, 4)"),)
    slow = Finding("slow", "what", "do", name="workers_zero", where=str(site), edits=edits)
    proof = Proof(("workers_zero",), "", {"input.workers": 2}, edits, "prescribed")
    found = changes.changes_of(verdict(slow, seen=seen), Prescription([proof]))
    assert "num_workers=2, persistent_workers=True" in found.edits[0].after


def test_where_there_is_nothing_to_change_that_is_said(path):
    nothing = changes.changes_of(verdict())
    assert "there is nothing to change in your code" in told(changes.show, nothing)
    assert told(changes.write, nothing, Parity.EXACT) == "nothing was changed in your code\n"


@pytest.mark.parametrize(
    ("recipe", "outcome", "is_shown"),
    [
        ({}, "prescribed", True),
        ({}, "left alone", False),
        ({"script.garbage": "scheduled"}, "prescribed", False),
    ],
)
def test_what_was_proven_and_no_recipe_can_say_is_shown_unasked(
    path, capfdbinary, recipe, outcome, is_shown
):
    found = finding(path, "collect", 2, after="")
    proof = Proof(("collect",), "collect", edits=found.edits, recipe=recipe, outcome=outcome)
    asked = Asked(["train.py"], path.parent / "flatout.toml")
    for one, shows in ((asked, is_shown), (replace(asked, as_json=True), False)):
        console = Console(highlight=False, markup=False)
        _change_code(one, verdict(found), Prescription([proof]), console, runs=True)
        assert (b"-b = 2\n" in capfdbinary.readouterr().out) is shows
    assert path.read_text() == CODE
