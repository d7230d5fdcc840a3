"""The corpus is whole: every row has a script that runs, and a clean one that differs in little."""

import difflib
import multiprocessing
import os
import runpy
import socket
import sys
from contextlib import redirect_stdout

import pytest

from flatout.doctor.checks import CHECKS, RANK_CHECKS
from pitfalls import CORPUS, MARK, NEEDS, PARITIES, Pitfall, absence, patched, read_index

PITFALLS = read_index()
NAMES = {check.name for check in (*CHECKS, *RANK_CHECKS)}
each = pytest.mark.parametrize("pitfall", PITFALLS, ids=lambda pitfall: pitfall.name)


def test_each_script_has_one_row_and_each_row_a_script():
    names = [pitfall.name for pitfall in PITFALLS]
    assert len(names) == len(set(names))
    for files in ("pitfall/*.py", "clean/*.patch"):
        assert sorted(file.stem for file in CORPUS.glob(files)) == sorted(names)


@each
def test_a_row_says_what_it_can(pitfall):
    assert pitfall.checks
    assert {*pitfall.checks, *pitfall.also} <= NAMES
    assert not set(pitfall.checks) & set(pitfall.also)
    assert pitfall.parity in PARITIES
    assert pitfall.ranks in (1, 2)
    assert set(pitfall.needs) <= NEEDS.keys()
    assert pitfall.what


@each
def test_scripts_compile_and_know_nothing_of_flatout(pitfall, tmp_path):
    for file in (pitfall.script, pitfall.write_clean(tmp_path)):
        text = file.read_text()
        compile(text, str(file), "exec")
        assert "flatout" not in text.lower()
        assert len(text.splitlines()) < 80


@each
def test_the_clean_script_differs_in_few_lines(pitfall, tmp_path):
    bad = [line.replace(f"  {MARK}", "") for line in pitfall.script.read_text().splitlines()]
    good = pitfall.write_clean(tmp_path).read_text().splitlines()
    assert MARK not in "\n".join(good)
    changes = [line for line in difflib.ndiff(bad, good) if line[0] in "+-" and line[2:].strip()]
    assert 0 < len(changes) <= 20


@each
def test_marks_stand_on_lines_of_code(pitfall):
    assert pitfall.marked
    lines = pitfall.script.read_text().splitlines()
    assert all(lines[number - 1].split("#")[0].strip() for number in pitfall.marked)


def test_a_patch_is_applied_line_by_line_and_only_to_its_own_text():
    before, after = "a\nb\n\nc\nd\ne\nf\n", "b\n\nC\nd\ne\nE\nf\ng\n"
    for context in (1, 3):
        diff = difflib.unified_diff(
            before.splitlines(), after.splitlines(), "pitfall", "clean", n=context, lineterm=""
        )
        patch = "\n".join(line.rstrip() for line in diff)  # as editors leave it
        assert patched(before, patch) == after
    for other in (before.replace("c", "x"), "a\nb\n"):
        with pytest.raises(ValueError, match=r"line [34]: the patch expects"):
            patched(other, patch)


def test_what_the_machine_lacks_is_named(monkeypatch):
    monkeypatch.setitem(NEEDS, "keras", lambda: False)
    row = Pitfall("a", "what", "rounding", ("a",), needs=("sklearn", "keras"))
    assert absence(row) == "this machine lacks keras"


@pytest.mark.slow
@pytest.mark.long
@each
def test_both_run(pitfall, tmp_path):
    if reason := absence(pitfall):
        pytest.skip(reason)
    (tmp_path / "patched").mkdir()
    clean = pitfall.write_clean(tmp_path / "patched")
    for kind, script in (("pitfall", pitfall.script), ("clean", clean)):
        folder = tmp_path / kind
        folder.mkdir()
        assert run(script, pitfall.ranks, folder) == [0] * pitfall.ranks
        assert (folder / "said-by-0").read_text()


# Importing torch takes longer than a script's two steps: it is imported once, in the process from
# which those of the scripts are forked.
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["torch", "torch.distributed", "sklearn.metrics"])


def run(script, ranks, folder):
    """Two steps of a script; returns the exit code of each rank."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    shared = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    processes = [
        SERVER.Process(target=as_main, args=(script, folder, {**shared, "RANK": str(rank)}))
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    try:
        for process in processes:
            process.join(120)
        return [process.exitcode for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.join()


def as_main(script, folder, environment):
    """In its own process: what `python script --epochs 1 --steps 2` does."""
    os.environ.update(environment, OMP_NUM_THREADS="1")
    os.chdir(folder)
    multiprocessing.set_start_method("fork", force=True)  # as in a process that was started plainly
    sys.argv = [str(script), "--epochs", "1", "--steps", "2"]
    said = folder / f"said-by-{environment['RANK']}"
    with said.open("w") as file, redirect_stdout(file):
        runpy.run_path(str(script), run_name="__main__")
