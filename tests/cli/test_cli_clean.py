"""`flatout clean`: lists, asks, removes, and leaves what is in use."""

import json
import os
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from flatout.cache_folder import MARK, cache_folder, kind_folder
from flatout.cli.main import app
from flatout.doctor.trials.scratch import scratch
from flatout.unfinished import new_name


@pytest.fixture
def base():
    folder = cache_folder()
    for name in ("auto/a.toml", "ranks/b.json", "rows/abc/rows.bin"):
        kind_folder(name.partition("/")[0])
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"x" * 5000)
    (folder / "mine").mkdir()
    (folder / "mine" / "kept").touch()
    return folder


def clean(*arguments):
    return CliRunner().invoke(app, ["clean", *arguments])


def listed(result):
    found = json.loads(result.stdout)
    kept = {os.path.relpath(one["path"], found["folder"]): one for one in found["kept"]}
    return kept, [os.path.relpath(path, found["folder"]) for path in found["removed"]]


def test_unasked_it_lists_and_removes_nothing(base):
    said = clean().stdout
    assert "measured settings of models" in said
    assert "--yes" in said
    kept, removed = listed(clean("--json"))
    assert list(kept) == ["auto/a.toml", "ranks/b.json", "rows/abc"]
    assert all(one["bytes"] >= 5000 and not one["is_used"] for one in kept.values())
    assert removed == []


def test_it_removes_what_it_knows_and_nothing_else(base):
    result = clean("--yes")
    assert result.exit_code == 0
    assert "removed" in result.stdout
    left = [path for path in base.rglob("*") if path.is_file() and path.name != MARK]
    assert left == [base / "mine" / "kept"]
    assert "nothing is kept" in clean().stdout


def test_what_living_processes_use_stays(base):
    opened = base / "rows" / "abc" / "rows.bin"
    own = base / "rows" / new_name()
    own.mkdir()
    shown = kind_folder("live") / f"{os.getpid()}.json"
    shown.write_text("{}")
    with open(opened), scratch() as trial:
        _, removed = listed(clean("--yes", "--json"))
        assert removed == ["auto/a.toml", "ranks/b.json"]
        assert opened.exists()
        assert own.exists()
        assert shown.exists()
        assert trial.exists()


def test_a_file_that_another_process_has_mapped_stays(base):
    opened = base / "rows" / "abc" / "rows.bin"
    code = (
        f"import mmap; f = open({str(opened)!r}); m = mmap.mmap(f.fileno(), 0, prot=1); f.close(); "
    )
    code += "print('mapped', flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        other.stdout.readline()
        clean("--yes")
        assert opened.exists()
        other.communicate(b"\n")
    clean("--yes")
    assert not opened.exists()


def test_trials_that_were_killed_are_removed(base):
    code = "import os; from flatout.doctor.trials.scratch import scratch\n"
    code += "with scratch(): os.kill(os.getpid(), 9)"
    subprocess.run([sys.executable, "-c", code])
    kept, removed = listed(clean("--yes", "--json"))
    (killed,) = [name for name, one in kept.items() if one["kind"] == "trials"]
    assert killed in removed
    assert not (base / killed).exists()


def test_a_cache_within_a_folder_of_the_users_costs_no_file_of_theirs(tmp_path, monkeypatch):
    home = tmp_path / "home"
    for name in ("files", "rows", "trials", "samples", "sample-of-mine", "elsewhere"):
        (home / name).mkdir(parents=True)
        (home / name / "thesis").write_text("mine")
    (home / "edits").symlink_to(home / "elsewhere")
    monkeypatch.setenv("FLATOUT_CACHE", str(home))
    kind_folder("files").joinpath("0" * 24).touch()  # beside theirs
    for kind in ("index", "auto"):
        kind_folder(kind)
    (home / "index" / "link").symlink_to(home / "elsewhere")
    (home / "auto" / "tree").mkdir()
    (home / "auto" / "tree" / "link").symlink_to(home / "elsewhere")
    result = clean("--yes")
    assert result.exit_code == 0
    assert f"{home / 'files'} was not made by Flatout" in result.stderr
    with scratch():
        pass
    assert not os.path.lexists(home / "index" / "link")
    assert not (home / "auto" / "tree").exists()
    kept = ("files", "rows", "trials", "samples", "sample-of-mine", "elsewhere")
    assert all((home / name / "thesis").read_text() == "mine" for name in kept)
    assert (home / "edits").is_symlink()
    assert (home / "index").stat().st_mode & 0o777 == 0o700
