"""The corpus is whole: every row has a script that runs, and a twin that differs in little."""

import difflib
import os
import subprocess
import sys

import pytest

from pitfalls import CORPUS, MARK, NEEDS, PARITIES, Pitfall, absence, read_index

PITFALLS = read_index()
each = pytest.mark.parametrize("pitfall", PITFALLS, ids=lambda pitfall: pitfall.name)


def test_each_script_has_one_row_and_each_row_a_script():
    names = [pitfall.name for pitfall in PITFALLS]
    assert len(names) == len(set(names))
    for folder in ("pitfall", "clean"):
        assert sorted(file.stem for file in (CORPUS / folder).glob("*.py")) == sorted(names)


@each
def test_a_row_says_what_it_can(pitfall):
    assert pitfall.numbers
    assert all(0 < number <= 60 for number in (*pitfall.numbers, *pitfall.also))
    assert not set(pitfall.numbers) & set(pitfall.also)
    assert pitfall.parity in PARITIES
    assert pitfall.ranks in (1, 2)
    assert set(pitfall.needs) <= NEEDS.keys()
    assert pitfall.what


@each
def test_scripts_compile_and_know_nothing_of_flatout(pitfall):
    for file in (pitfall.script, pitfall.twin):
        text = file.read_text()
        compile(text, str(file), "exec")
        assert "flatout" not in text.lower()
        assert len(text.splitlines()) < 80


@each
def test_the_twin_differs_in_few_lines(pitfall):
    bad = [line.replace(f"  {MARK}", "") for line in pitfall.script.read_text().splitlines()]
    good = pitfall.twin.read_text().splitlines()
    assert MARK not in "\n".join(good)
    changes = [line for line in difflib.ndiff(bad, good) if line[0] in "+-" and line[2:].strip()]
    assert 0 < len(changes) <= 20


@each
def test_marks_stand_on_lines_of_code(pitfall):
    assert pitfall.marked
    lines = pitfall.script.read_text().splitlines()
    assert all(lines[number - 1].split("#")[0].strip() for number in pitfall.marked)


def test_what_the_machine_lacks_is_named(monkeypatch):
    monkeypatch.setitem(NEEDS, "keras", lambda: False)
    row = Pitfall("a", (1,), "what", "rounding", needs=("sklearn", "keras"))
    assert absence(row) == "this machine lacks keras"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["script", "twin"])
@each
def test_it_runs(pitfall, kind, tmp_path):
    if reason := absence(pitfall):
        pytest.skip(reason)
    ranks = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={pitfall.ranks}"]
    done = subprocess.run(
        [
            sys.executable,
            *(ranks if pitfall.ranks > 1 else []),
            getattr(pitfall, kind),
            *("--epochs", "1", "--steps", "2"),
        ],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout
