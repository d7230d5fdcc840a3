"""Tests that each command refuses names of 300 letters, which no file system or network accepts."""

import sys

import pytest

from flatout.cli import main

LONG = "n" * 300


def refused(words, monkeypatch, capsys):
    """Run a command that fails, and return its output without white space."""
    monkeypatch.setattr(sys, "argv", ["flatout", *words])
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # typer replaces it
    with pytest.raises(SystemExit) as caught:
        main.main()
    printed = "".join(capsys.readouterr())
    assert caught.value.code in (1, 2), printed
    return "".join(printed.split())


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["run", f"{LONG}.py"], "no such script"),
        (["run", "--recipe", LONG, "script.py"], "cannot read the Recipe: File name too long"),
        (
            [
                "run",
                "--nodes",
                "2",
                "--node-rank",
                "1",
                "--rendezvous",
                f"{LONG}:4000",
                "script.py",
            ],
            "expected the first node's host and a port",
        ),
        (["doctor", f"{LONG}.py"], "no such script"),
        (["doctor", "--page", f"{LONG}.html", "script.py"], "File name too long"),
        (["doctor", "--trace", f"{LONG}.json", "script.py"], "File name too long"),
        (["doctor", "--recipe", f"{LONG}.toml", "script.py"], "File name too long"),
        (["doctor", "--trace", f"{LONG}/trace.json", "script.py"], "there is no such folder"),
        (["top", LONG], "no job"),
        (["explain", LONG], "cannot read a run's figures: File name too long"),
        (["report", LONG], "expected the folder of a run, found none"),
        (["runs", LONG], "expected a folder with runs, found none"),
        (["export", LONG, "model.safetensors"], "there is no such file or folder"),
        (["scaling", LONG, LONG], "cannot read a run's figures: File name too long"),
        (["forecast", LONG], "cannot read a Profile: File name too long"),
        (["jobs", LONG], "no job"),
        (["submit", "slurm", "--dry-run", f"{LONG}.py"], "no such script"),
        (["submit", "slurm", "--dry-run", "--name", LONG, "script.py"], "expected a job's name"),
        (["submit", "slurm", "--dry-run", "--input", LONG, "script.py"], "would be refused"),
        (["submit", "ssh", "--folder", LONG, "--yes", "script.py"], "no hosts"),
        (["data", "inspect", LONG], "there is no file"),
    ],
)
def test_a_name_that_is_too_long_is_refused_in_words(
    tmp_path, monkeypatch, capsys, words, expected
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    (tmp_path / "script.py").write_text("raise SystemExit('this script is not to be run')\n")
    printed = refused(words, monkeypatch, capsys)
    assert expected.replace(" ", "") in printed
    assert "Traceback" not in printed
    assert "nottoberun" not in printed
