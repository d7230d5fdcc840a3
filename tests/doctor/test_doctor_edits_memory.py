"""The user's code run with edits that are made in memory, and edits as a file."""

import json
import os
import subprocess
import sys

import pytest

from flatout.doctor.edits import dump, load
from flatout.doctor.edits.source import Source, by_file
from flatout.doctor.finding import Edit
from flatout.errors import FlatoutError

RUN = """
import os, sys
from pathlib import Path
from flatout.doctor.edits import install, load
from flatout.observe.run_script import run
install(load(Path(os.environ["FLATOUT_EDITS"])))
run(sys.argv[1:])
"""


def run_with(edits, folder, *command):
    dump(folder / "edits.json", edits)
    return subprocess.run(
        [sys.executable, "-c", RUN, *command],
        cwd=folder,
        env={**os.environ, "FLATOUT_EDITS": str(folder / "edits.json")},
        capture_output=True,
        text=True,
    )


@pytest.fixture
def script(tmp_path):
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "__init__.py").write_text("NUMBER = 1\n")
    (tmp_path / "parts" / "other.py").write_text("def word():\n    return 'old'\n")
    (tmp_path / "train.py").write_text(
        "import traceback\n"
        "import multiprocessing\n"
        "import parts\n"
        "from parts.other import word\n"
        "\n"
        "MINE = 'old'\n"
        "\n"
        "def job(queue):\n"
        "    queue.put((MINE, word(), parts.NUMBER))\n"
        "\n"
        "def fails():\n"
        "    raise ValueError(MINE)\n"
        "\n"
        "if __name__ == '__main__':\n"
        "    print(MINE, word(), parts.NUMBER)\n"
        "    for way in ('spawn', 'fork', 'forkserver'):\n"
        "        context = multiprocessing.get_context(way)\n"
        "        queue = context.Queue()\n"
        "        process = context.Process(target=job, args=(queue,))\n"
        "        process.start()\n"
        "        print(way, *queue.get())\n"
        "        process.join()\n"
        "    try:\n"
        "        fails()\n"
        "    except ValueError:\n"
        "        print(traceback.format_exc())\n"
    )
    return tmp_path


def edits_of(folder):
    return [
        Edit(str(folder / "train.py"), 6, "MINE = 'old'", "# one more line\nMINE = 'new'"),
        Edit(
            str(folder / "train.py"),
            12,
            "    raise ValueError(MINE)",
            "    raise ValueError(MINE + '!')",
        ),
        Edit(str(folder / "parts" / "other.py"), 2, "    return 'old'", "    return 'new'"),
        Edit(str(folder / "parts" / "__init__.py"), 1, "NUMBER = 1", "NUMBER = 2"),
    ]


def test_script_modules_and_workers_run_with_edits_and_files_stay(script):
    before = {path: path.read_bytes() for path in script.rglob("*.py")}
    plain = subprocess.run(
        [sys.executable, "train.py"], cwd=script, capture_output=True, text=True, check=True
    )
    assert plain.stdout.splitlines()[0] == "old old 1"
    ran = run_with(edits_of(script), script, "train.py")
    assert ran.returncode == 0, ran.stderr
    lines = ran.stdout.splitlines()
    assert lines[:4] == ["new new 2", "spawn new new 2", "fork new new 2", "forkserver new new 2"]
    assert "train.py\", line 13, in fails\n    raise ValueError(MINE + '!')" in ran.stdout
    assert {path: path.read_bytes() for path in script.rglob("*.py")} == before
    # Nor is what was compiled kept for runs without them.
    again = subprocess.run(
        [sys.executable, "train.py"], cwd=script, capture_output=True, text=True, check=True
    )
    assert again.stdout.splitlines()[:2] == plain.stdout.splitlines()[:2]


def test_module_runs_with_edits(script):
    (script / "parts" / "__main__.py").write_text("from parts.other import word\nprint(word())\n")
    edit = Edit(str(script / "parts" / "__main__.py"), 2, "print(word())", "print(2 * word())")
    ran = run_with([edit, edits_of(script)[2]], script, "-m", "parts")
    assert ran.stdout == "newnew\n", ran.stderr


def test_what_changed_meanwhile_is_told_with_its_line(script):
    edits = edits_of(script)
    (script / "parts" / "other.py").write_text("def word():\n    return 'mine'\n")
    ran = run_with(edits, script, "train.py")
    assert ran.returncode == 1
    assert "the file has changed: expected \"return 'old'\", found \"return 'mine'\"" in ran.stderr
    assert f"{script / 'parts' / 'other.py'}:2" in ran.stderr


def test_edits_pass_through_a_file(tmp_path):
    edits = (Edit("é.py", 3, "\tx\r\n\ty", ""), Edit("b.py", 1, "'\"'", "\n"))
    dump(tmp_path / "edits.json", edits)
    assert load(tmp_path / "edits.json") == edits
    (tmp_path / "edits.json").write_text(json.dumps([{"file": "a"}]))
    with pytest.raises(FlatoutError, match=r"no file of edits[^\n]*\n[^\n]*edits\.json"):
        load(tmp_path / "edits.json")


def changed(data, *edits, folder):
    path = folder / "code.py"
    path.write_bytes(data)
    edits = [Edit(str(path), *edit) for edit in edits]
    return Source.read(str(path)).with_edits(edits).encode()


@pytest.mark.parametrize(
    ("before", "edit", "after"),
    [
        (b"a = 1\r\nb = 2\r\n", (1, "a = 1", "a = 3"), b"a = 3\r\nb = 2\r\n"),
        (b"a = 1\nb = 2", (2, "b = 2", "b = 3"), b"a = 1\nb = 3"),
        (b"a = 1\nb = 2\n", (1, "a = 1", ""), b"b = 2\n"),
        (b"a = 1\n\n\nb = 2\n", (1, "a = 1\n\n", "c = 1"), b"c = 1\nb = 2\n"),
        (b"\xef\xbb\xbfa = 1\n", (1, "a = 1", "a = 2"), b"\xef\xbb\xbfa = 2\n"),
        (
            b"# coding: latin-1\na = '\xe9'  # \xe8\n",
            (2, "a = 'é'  # è", "b = 'é'  # è"),
            b"# coding: latin-1\nb = '\xe9'  # \xe8\n",
        ),
        (b"a = 1\x0c\nb = '\x0b'\n", (2, "b = '\x0b'", "b = 2"), b"a = 1\x0c\nb = 2\n"),
    ],
)
def test_the_rest_of_a_file_stays_byte_for_byte(before, edit, after, tmp_path):
    assert changed(before, edit, folder=tmp_path) == after


def test_two_edits_of_one_line_are_combined_or_refused(tmp_path):
    line = "f(a, b, c)"
    one, other = (1, line, "f(x, b, c)"), (1, line, "f(a, b, y)")
    data = line.encode() + b"\n"
    assert changed(data, one, other, folder=tmp_path) == b"f(x, b, y)\n"
    assert changed(data, one, one, folder=tmp_path) == b"f(x, b, c)\n"
    with pytest.raises(FlatoutError, match=r"two edits change the same words\n.*code\.py:1"):
        changed(data, one, (1, line, "f(z, b, c)"), folder=tmp_path)
    more, most = (1, line, "f(a, b, c, d=1)"), (1, line, "f(a, b, c, e=1)")
    assert changed(data, more, most, folder=tmp_path) == b"f(a, b, c, d=1, e=1)\n"
    with pytest.raises(FlatoutError, match="keyword argument repeated"):
        changed(data, more, (1, line, "f(a, b, c, d=12)"), folder=tmp_path)
    above, below = (1, line, f"a = 1\n{line}"), (1, line, f"if a:\n    {line}")
    with pytest.raises(FlatoutError, match="same words"):
        changed(data, above, below, folder=tmp_path)


@pytest.mark.parametrize(
    ("data", "edit", "what"),
    [
        (b"a = 1\n", (2, "b = 2", "c"), "expected 'b = 2', found ''"),
        (b"a = 1\n", (0, "a = 1", "c"), "expected 'a = 1', found ''"),
        (b"a = 1 \n", (1, "a = 1", "c"), "has changed"),
        (b"a = 1\n", (1, "a = 1", "c d"), "code that Python refuses"),
        (b"# coding: ascii\na = 1\n", (2, "a = 1", "b = 'é'"), "cannot be written"),
        (b"# coding: ascii\na = '\xe9'\n", (2, "a = 1", "b"), "no text that Python reads"),
        (b"# coding: nonsense\n", (1, "a = 1", "b"), "no text that Python reads"),
    ],
)
def test_what_cannot_be_edited_is_said(data, edit, what, tmp_path):
    with pytest.raises(FlatoutError, match=what):
        changed(data, edit, folder=tmp_path)


def test_files_are_one_under_two_names(tmp_path):
    (tmp_path / "link.py").symlink_to(tmp_path / "code.py")
    edits = [Edit(str(tmp_path / name), 1, "a", "b") for name in ("code.py", "link.py")]
    assert by_file(edits) == {str(tmp_path / "code.py"): edits}
