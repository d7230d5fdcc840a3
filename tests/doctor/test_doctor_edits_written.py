"""Edits as a diff, and written into the user's files."""

import os
import shlex
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from flatout.doctor.edits import Fixed, diff, fix
from flatout.doctor.edits import written as writing
from flatout.doctor.edits.patch import folder_of
from flatout.doctor.finding import Edit
from flatout.errors import FlatoutError

FILES = {
    "plain.py": b"a = 1\nb = 2\nc = 3\n",
    "windows.py": b"a = 1\r\nb = 2\r\nc = 3\r\n",
    "no_end.py": b"a = 1\nb = 2",
    "deep/my file.py": b"\xef\xbb\xbfa = 1\nb = 2\n",
    "latin.py": b"# coding: latin-1\nb = 2  # \xe9\n",
}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "deep").mkdir()
    for name, data in FILES.items():
        (tmp_path / name).write_bytes(data)
    return tmp_path


def edits_in(folder):
    """b = 2 goes from the last line but one, else gets a line before it."""
    found = []
    for name in FILES:
        line = 2
        before = "b = 2  # é" if name == "latin.py" else "b = 2"
        after = "" if name == "plain.py" else f"b = 0\n{before}"
        found.append(Edit(str(folder / name), line, before, after))
    return found


EDITED = {
    "plain.py": b"a = 1\nc = 3\n",
    "windows.py": b"a = 1\r\nb = 0\nb = 2\r\nc = 3\r\n",
    "no_end.py": b"a = 1\nb = 0\nb = 2",
    "deep/my file.py": b"\xef\xbb\xbfa = 1\nb = 0\nb = 2\n",
    "latin.py": b"# coding: latin-1\nb = 0\nb = 2  # \xe9\n",
}


def contents(folder):
    return {name: (folder / name).read_bytes() for name in FILES}


@pytest.mark.parametrize("tool", [["patch", "-p1"], ["git", "apply"]])
def test_the_diff_is_taken_by_patch_and_git(folder, tool):
    text = diff(edits_in(folder), folder)
    assert contents(folder) == FILES
    data = text.encode("utf-8", "surrogateescape")
    ran = subprocess.run(tool, cwd=folder, input=data, capture_output=True)
    assert ran.returncode == 0, (ran.stdout, ran.stderr)
    assert contents(folder) == EDITED


def test_a_diff_holds_files_below_its_folder_only(folder):
    with pytest.raises(FlatoutError, match=r"does not lie below .*deep"):
        diff(edits_in(folder), folder / "deep")


def test_the_folder_of_a_diff_is_the_current_one_where_it_can_be(folder, monkeypatch):
    monkeypatch.chdir(folder)
    assert folder_of(edits_in(folder)) == Path(os.path.realpath(folder))
    deep = [edit for edit in edits_in(folder) if "deep" in edit.file]
    assert folder_of(deep) == Path(os.path.realpath(folder))
    monkeypatch.chdir(folder / "deep")
    assert folder_of(edits_in(folder)) == Path(os.path.realpath(folder))
    assert folder_of([]) == Path(os.path.realpath(folder / "deep"))


def test_files_are_written_with_their_mode_and_undone(folder):
    (folder / "plain.py").chmod(0o754)
    (folder / "link.py").symlink_to(folder / "windows.py")
    edits = [
        Edit(str(folder / "link.py"), e.line, e.before, e.after) if "windows" in e.file else e
        for e in edits_in(folder)
    ]
    fixed = fix(edits)
    assert isinstance(fixed, Fixed)
    assert contents(folder) == EDITED
    assert stat.S_IMODE((folder / "plain.py").stat().st_mode) == 0o754
    assert (folder / "link.py").is_symlink()
    assert not list(folder.glob(".*"))
    assert {os.path.relpath(file, folder) for file in fixed.files} == set(FILES)
    # The undo is a command that a user can type.
    subprocess.run(shlex.split(fixed.command), check=True, capture_output=True, cwd="/")
    assert contents(folder) == FILES


def test_nothing_is_written_where_one_file_has_changed(folder):
    (folder / "no_end.py").write_bytes(b"a = 1\nb = 3")
    before = contents(folder)
    with pytest.raises(FlatoutError, match=r"the file has changed.*\n.*no_end\.py:2"):
        fix(edits_in(folder))
    assert contents(folder) == before
    assert not Path(os.environ["FLATOUT_CACHE"]).exists()


@pytest.mark.parametrize("name", ["plain.py", "latin.py"])
def test_a_file_that_cannot_be_replaced_leaves_all_as_they_were(folder, monkeypatch, name):
    replace = os.replace
    failed = []

    def fails_once(new, file):
        if os.path.basename(file) == name and not failed:
            failed.append(file)
            raise OSError(28, "No space left on device", file)
        replace(new, file)

    monkeypatch.setattr(writing.os, "replace", fails_once)
    with pytest.raises(FlatoutError, match=r"No space left on device\), so none was changed"):
        fix(edits_in(folder))
    assert contents(folder) == FILES
    assert not list(folder.glob(".*.part"))
    assert not list((Path(os.environ["FLATOUT_CACHE"]) / "edits").glob("*.patch*"))


def test_a_file_without_permission_is_said_before_anything_is_written():
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        open_to_all = folder / "open.py"
        open_to_all.write_bytes(b"b = 2\n")
        open_to_all.chmod(0o666)
        script = folder / "train.py"
        script.write_bytes(b"b = 2\n")
        script.chmod(0o444)
        child = os.fork()
        if not child:
            code = 1
            try:
                if not os.geteuid():
                    os.setuid(65534)  # root may write everywhere
                fix([Edit(str(file), 1, "b = 2", "b = 3") for file in (open_to_all, script)])
            except FlatoutError as error:
                code = 0 if "cannot be written, so none was changed" in error.what else 2
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert open_to_all.read_bytes() == script.read_bytes() == b"b = 2\n"


def test_a_reader_of_the_file_never_sees_half_of_it(tmp_path):
    path = tmp_path / "train.py"
    path.write_text("a = 1\n" * 20_000)
    with path.open() as held:
        fix([Edit(str(path), 1, "a = 1", "b = 1")])
        assert held.read() == "a = 1\n" * 20_000
    assert path.read_text().startswith("b = 1\na = 1\n")
    assert sys.getsizeof(path.read_text()) > 100_000
