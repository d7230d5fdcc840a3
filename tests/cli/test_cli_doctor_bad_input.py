"""`flatout doctor` on scripts that misbehave: told plainly, nothing hangs, stays or is changed."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
from test_cli_doctor_script import TRAIN, command, leftovers
from typer.testing import CliRunner

from flatout.cache_folder import MARK
from flatout.cli.doctor import misplaced
from flatout.cli.main import app
from flatout.doctor.first_look import STARTING_S, first_look

SOME_STEPS = TRAIN + "import os, time\nfor _ in range(40): step()\n"


@dataclass(frozen=True)
class Bad:
    """A script, and what comes of it: the exit code, and words that the doctor says."""

    text: str
    code: int
    said: str


BAD = {
    "nothing": Bad("", 0, "took no optimizer step before it ended"),
    "leaves at once": Bad("import os\nos._exit(5)\n", 1, "failed (exit code 5)"),
    "a syntax error": Bad("for epoch in range(3)\n    pass\n", 1, "expected ':'"),
    "leaves by os._exit": Bad(SOME_STEPS + "os._exit(0)\n", 0, "FIRST LOOK at 40 steps"),
    "becomes another program": Bad(
        SOME_STEPS + "os.execv('/bin/echo', ['echo'])\n", 0, "become another program (/bin/echo)"
    ),
    "fails to become one": Bad(
        TRAIN + "import os\ntry:\n    os.execv('/no/such', ['such'])\nexcept OSError:\n    pass\n"
        "for _ in range(40): step()\n",
        0,
        "FIRST LOOK at 40 steps",
    ),
    "forks, and both train": Bad(
        TRAIN + "import os\nis_child = not os.fork()\nfor _ in range(40): step()\n"
        "while is_child: step()\n",
        0,
        "FIRST LOOK at 40 steps",
    ),
    "trains in a thread": Bad(
        TRAIN + "import threading\ndef train():\n    for _ in range(40): step()\n"
        "thread = threading.Thread(target=train)\nthread.start()\nthread.join()\n",
        0,
        "an optimizer stepped in a thread beside the main one",
    ),
    "leaves a daemon": Bad(
        SOME_STEPS + "if os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n"
        "        time.sleep(600)\n    os._exit(0)\nos.wait()\n",
        0,
        "FIRST LOOK at 40 steps",
    ),
    "runs out of memory": Bad(
        TRAIN + "import resource\nfor _ in range(40): step()\n"
        "resource.setrlimit(resource.RLIMIT_AS, (2**30, 2**30))\nkeep = []\n"
        "while True: keep.append(torch.ones(2**22))\n",
        1,
        "allocate memory",
    ),
    "closes its output": Bad(
        SOME_STEPS + "os.closerange(0, 256)\nfor _ in range(20): step()\n",
        0,
        "FIRST LOOK at 60 steps",
    ),
    "prints megabytes": Bad(
        SOME_STEPS + "for _ in range(30): print('x' * 10**6)\nraise ValueError('loud')\n",
        1,
        "ValueError: loud",
    ),
    "hangs at its end": Bad(
        TRAIN + "import atexit, time\natexit.register(time.sleep, 600)\nwhile True: step()\n",
        0,
        "FIRST LOOK",
    ),
    "deletes what there is": Bad(
        TRAIN + "import os, shutil\nshutil.rmtree(os.path.dirname(os.path.abspath(__file__)))\n"
        "for _ in range(40): step()\n",
        0,
        "FIRST LOOK at 40 steps",
    ),
    "writes elsewhere": Bad(
        TRAIN + "import os\nos.chdir('..')\nopen('beside', 'w').write('x')\n"
        "open('other/kept', 'a').write('x')\nfor _ in range(40): step()\n",
        0,
        "FIRST LOOK at 40 steps",
    ),
}


def run(bad, tmp_path):
    """Runs the doctor in its own folder beside another; returns it and what it has said."""
    here, other = tmp_path / "here", tmp_path / "other"
    for folder in (here, other):
        folder.mkdir()
        (folder / "kept").write_text("mine")
    (here / "train.py").write_text(bad.text)
    before = files(tmp_path)
    # It does not wait until its patience ends, which is later than that.
    done = subprocess.run(
        command("--seconds", "1", "train.py"),
        capture_output=True,
        text=True,
        cwd=here,
        timeout=STARTING_S,
    )
    assert files(tmp_path) == before
    assert leftovers(here) == []
    return done


def files(folder):
    return {
        path.relative_to(folder): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != MARK
    }


def check(bad, tmp_path):
    done = run(bad, tmp_path)
    assert bad.said in " ".join(done.stdout.split()), done.stdout + done.stderr
    assert done.returncode == bad.code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stdout) < 20_000


@pytest.mark.slow
def test_a_script_that_is_no_python(tmp_path):
    check(Bad("\x7fELF\0\0", 1, "null bytes"), tmp_path)


@pytest.fixture(scope="module")
def checked(request, tmp_path_factory):
    """Each check that is asked for, two at a time: most of one is Python that imports."""
    names = [
        item.callspec.params["name"]
        for item in request.session.items
        if getattr(item, "originalname", "") == "test_a_script_that_misbehaves"
    ]
    with ThreadPoolExecutor(2) as pool:
        yield {
            name: pool.submit(check, BAD[name], tmp_path_factory.mktemp("bad")) for name in names
        }
        pool.shutdown(cancel_futures=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", BAD)
def test_a_script_that_misbehaves(checked, name):
    checked[name].result()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["python3.11", "train.py"], "without python3.11"),
        (["cells.ipynb"], "a notebook is no script"),
        (["."], "no such script"),
    ],
)
def test_what_is_no_script_is_refused_before_anything_runs(given, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cells.ipynb").write_text("{}")
    done = CliRunner().invoke(app, ["doctor", *given])
    assert done.exit_code == 2
    assert said in " ".join(done.output.split())


def test_options_behind_the_script_are_told_where_no_file_of_it_knows_them(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("from settings import args\n")
    (tmp_path / "settings.py").write_text("parser.add_argument('--steps')\ntime_budget = 3\n")
    own = {"--steps", "--budget", "--no-trials", "--json", "-y"}
    given = ["--steps", "3", "--budget=0", "--no-trials", "-y", "--epochs", "--json=a", "--json"]
    assert misplaced(given, own, script) == ["--no-trials", "--json"]
    assert misplaced(given, own, None) == []


@pytest.mark.slow
def test_a_name_that_is_no_text(tmp_path):
    folder = tmp_path / os.fsdecode(b"caf\xe9 au lait")
    folder.mkdir()
    (folder / os.fsdecode(b"tr\xff in.py")).write_text("print('hello')\n")
    done = subprocess.run(
        command("--json", "--page", "page.html", os.fsencode(folder) + b"/tr\xff in.py"),
        capture_output=True,
        cwd=tmp_path,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["output"][0] == "hello"
    assert "in.py" in (tmp_path / "page.html").read_text(encoding="utf-8")


@pytest.mark.slow
def test_an_output_that_cannot_say_it_all(tmp_path):
    (tmp_path / "train.py").write_text("print('hello')\n")
    done = subprocess.run(
        command("train.py"),
        capture_output=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert b"no optimizer step" in done.stdout


@pytest.mark.slow
def test_a_deaf_script_that_never_steps_is_ended(tmp_path):
    script = tmp_path / "deaf.py"
    script.write_text(
        "import signal, time\n"
        "for number in (1, 2, 15): signal.signal(number, signal.SIG_IGN)\n"
        "while True:\n    try: time.sleep(600)\n    except BaseException: pass\n"
    )
    look = first_look([str(script)], seconds=1, starting_s=2)
    assert look.exit_code is None
    assert not look.failed
    assert leftovers(Path.cwd()) == [] or str(script) not in str(leftovers(Path.cwd()))


@pytest.mark.slow
def test_a_script_that_starts_itself_again_is_told_as_such(tmp_path):
    again = "import os, sys\nif 'AGAIN' not in os.environ:\n    os.environ['AGAIN'] = '1'\n"
    again += "    os.execv(sys.executable, [sys.executable, *sys.argv])\n"
    done = run(Bad(again + SOME_STEPS, 0, ""), tmp_path)
    words = " ".join(done.stdout.split())
    assert "took no optimizer step" in words
    assert f"become another program ({sys.executable})" in words
