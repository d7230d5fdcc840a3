"""`flatout report` and `flatout runs`: what they print, write and exit with."""

import json

import pytest
from report_runs import make_run, write_lines
from typer.testing import CliRunner

from flatout.cli.main import app
from flatout.errors import FlatoutError
from flatout.measure import Profile
from made_up_profiles import NOW


def call(*words):
    return CliRunner().invoke(app, list(map(str, words)))


def test_a_run_is_told_and_its_page_written(tmp_path):
    run = make_run(tmp_path / "a")
    done = call("report", run)
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith("Net trained 400 steps, 2 epochs")
    assert (run / "report.html").read_text().startswith("<!doctype html>")
    (run / "report.html").unlink()
    found = json.loads(call("report", run, "--json").stdout)
    assert found["profile"]["steps"]["last"] == 400
    assert not (run / "report.html").exists()


def test_ci_gets_an_exit_code_of_its_own(tmp_path):
    a, b = make_run(tmp_path / "a"), make_run(tmp_path / "b", ms=60.0)
    page = tmp_path / "both.html"
    done = call("report", a, b, "--fail-if", "slower=5%", "--html", page)
    assert done.exit_code == 3
    assert "FAILED: b is 50% slower [" in done.stdout
    assert page.exists()
    assert not (a / "report.html").exists()
    assert call("report", a, b, "--fail-if", "slower=60%").exit_code == 0
    failed = json.loads(call("report", a, b, "--json", "--fail-if", "slower=5%").stdout)["failed"]
    assert len(failed) == 1
    wrong = call("report", a, b, "--fail-if", "slower")
    assert isinstance(wrong.exception, FlatoutError)


def test_the_history_lists_runs_the_newest_last(tmp_path):
    make_run(tmp_path / "week1" / "b")
    make_run(tmp_path / "week1" / "a", ended=False)
    resumed = tmp_path / "week1" / "b" / "runs.jsonl"
    later = {"event": "began", "id": "2", "time": NOW + 600, "host": "elsewhere", "pid": 1}
    write_lines(resumed, [*map(json.loads, resumed.read_text().splitlines()), later])
    done = call("runs", tmp_path)
    assert done.exit_code == 0, done.output
    rows = [line.split() for line in done.stdout.splitlines()[1:]]
    assert [(row[0], row[3]) for row in rows] == [
        ("week1/a", "running?"),
        ("week1/b", "ended"),
        ("week1/b", "running?"),
    ]
    assert "val_loss 0.7" in done.stdout or "accuracy 0.75" in done.stdout
    found = json.loads(call("runs", tmp_path, "--json").stdout)["runs"]
    assert [one["state"] for one in found] == ["running?", "ended", "running?"]
    assert found[1]["seconds"] == 60


def test_where_no_run_is_that_is_said(tmp_path):
    for folder, words in ((tmp_path / "none", "found none"), (tmp_path, "no run has left")):
        done = call("runs", folder)
        assert isinstance(done.exception, FlatoutError)
        assert words in str(done.exception)


@pytest.mark.slow
def test_of_a_thousand_runs_a_report_reads_few(tmp_path, monkeypatch):
    first = make_run(tmp_path / "r0")
    files = {name: (first / name).read_text() for name in ("profile.json", "runs.jsonl")}
    for number in range(1, 1000):
        folder = tmp_path / f"r{number}"
        (folder / "checkpoints" / "step-1").mkdir(parents=True)
        for name, text in files.items():
            (folder / name).write_text(text)
    reads, read = [], Profile.read
    monkeypatch.setattr(Profile, "read", lambda path: reads.append(path) or read(path))
    done = call("runs", tmp_path)
    assert "the newest of 1,000 runs" in done.stdout
    assert len(done.stdout.splitlines()) == 22
    assert call("report", first, tmp_path / "r5").exit_code == 0
    assert 2 < len(reads) <= 52
