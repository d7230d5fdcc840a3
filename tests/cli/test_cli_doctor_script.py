"""`flatout doctor script.py`: real scripts, real signals, and nothing left behind."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import psutil
import pytest
from typer.testing import CliRunner

from flatout.cli.main import app

FLATOUT = "import flatout.cli.main as m, sys; sys.argv[0] = 'flatout'; m.main()"

TRAIN = """
import sys, torch
from torch import nn
torch.set_num_threads(1)
model = nn.Sequential(nn.Linear(8, 64), nn.Dropout(0.5), nn.Linear(64, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x, y = torch.randn(32, 8), torch.randint(0, 2, (32,))

def step():
    loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def command(*arguments):
    return [sys.executable, "-c", FLATOUT, "doctor", *arguments]


def doctor(folder, *arguments, **given):
    return subprocess.run(
        command(*arguments), capture_output=True, text=True, cwd=folder, timeout=120, **given
    )


@pytest.fixture
def script(tmp_path):
    def write(text, name="train.py"):
        (tmp_path / name).write_text(text)
        return tmp_path

    return write


def leftovers(folder):
    """Processes that name this folder, or work in it, besides this one."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and process.cwd() == str(folder):
                found.append(process.cmdline())
        except psutil.Error:
            continue
    return found


@pytest.mark.slow
def test_a_danger_is_told_with_its_line_and_its_exit_code(script):
    epochs = "for epoch in range(3):\n    for _ in range(10): step()\n"
    text = TRAIN + epochs + "    with torch.no_grad(): model(x)\n"
    folder = script(text)
    given = ["train.py", "--name", "long" * 50]
    done = doctor(folder, *given)
    assert done.returncode == 3, done.stderr
    assert "FIRST LOOK at 30 steps, nothing proven; added" in done.stdout
    line = text.count("\n")
    assert f"train.py:{line} validates without eval(): Dropout" in " ".join(done.stdout.split())
    assert "checks found nothing" not in done.stdout  # --verbose has that
    # What is to be copied is one line, however narrow the terminal is.
    assert re.search(rf" flatout doctor .*{' '.join(given)}   # .*\n", done.stdout)
    assert leftovers(folder) == []


@pytest.mark.slow
def test_json_is_one_object_and_the_options_behind_the_script_are_its_own(script, monkeypatch):
    monkeypatch.setenv("PYTHONUNBUFFERED", "1")  # else what it prints comes at its end
    folder = script(
        TRAIN + "print('told', sys.argv[1:])\nfor _ in range(10**9): step()\n", "mine.py"
    )
    done = doctor(folder, "--json", "--steps", "20", "mine.py", "--json", "--seconds", "x")
    assert done.returncode == 0, done.stdout + done.stderr
    seen = json.loads(done.stdout)
    assert seen["command"] == ["mine.py", "--json", "--seconds", "x"]
    assert (seen["steps"], seen["ended"]) == (20, "stopped")
    assert seen["output"][0] == "told ['--json', '--seconds', 'x']"
    assert {"critical", "findings", "passed", "unknown", "added_us_per_step"} <= {*seen}


def test_a_script_that_fails_shows_its_own_last_lines(script):
    name = "a_long_name_" * 10 + ".py"
    folder = script("def rain():\n    raise ValueError('no such weather')\nrain()\n", name)
    done = doctor(folder, name)
    assert done.returncode == 1
    assert "error: the script failed (exit code 1)" in done.stdout
    assert "ValueError: no such weather" in done.stdout
    assert f'/{name}", line 2' in done.stdout  # wider than the screen, and whole
    assert "do: it ran in a scratch copy, offline; --in-place runs it as it is" in done.stdout
    assert "flatout/observe" not in done.stdout


def test_a_question_is_told_as_such(script):
    folder = script("name = input('your name? ')\n")
    done = doctor(folder, "train.py", stdin=subprocess.PIPE)
    assert done.returncode == 1
    assert "asked for input" in done.stdout
    assert "--in-place" not in done.stdout


def test_no_training_script_is_told_plainly_with_its_output_beside(script):
    folder = script("print('hello')\n")
    done = doctor(folder, "--verbose", "train.py")
    assert done.returncode == 0
    assert "no optimizer step" in done.stdout
    assert "FIRST LOOK" not in done.stdout
    assert "hello" in done.stderr
    assert "hello" not in done.stdout


@pytest.mark.parametrize("wrong", [["absent.py"], ["-m"], ["--seconds", "0", "absent.py"]])
def test_wrong_usage_says_so(wrong, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["doctor", *wrong])
    assert done.exit_code == 2
    assert "Error" in done.output


HANGS = """
import os, subprocess, sys, time
# One child in the group, one that leaves it.
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print("ready", flush=True)
"""


def start(folder, *arguments):
    """The doctor, once the script has said that it is ready."""
    process = subprocess.Popen(
        command("--verbose", *arguments),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
    )
    assert "ready\n" in iter(process.stderr.readline, "")
    return process


@pytest.mark.slow
@pytest.mark.parametrize("where", [[], ["--in-place"]])
def test_ctrl_c_tells_what_was_seen_and_ends_the_script_with_its_children(script, where):
    folder = script(TRAIN + "for _ in range(10): step()\n" + HANGS + "while True: step()\n")
    process = start(folder, *where, "train.py")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "FIRST LOOK" in out
    assert "stopped by a signal (SIGINT)" in out
    assert leftovers(folder) == []


@pytest.mark.slow
@pytest.mark.parametrize("where", [[], ["--in-place"]])
def test_a_script_that_ignores_signals_is_ended_all_the_same(script, where):
    deaf = "import signal\nfor n in (2, 15): signal.signal(n, signal.SIG_IGN)\n"
    folder = script(deaf + HANGS + "time.sleep(600)\n")
    process = start(folder, *where, "train.py")
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 143, err
    assert "no optimizer step was seen" in out
    assert "SIGTERM" in out
    assert leftovers(folder) == []


@pytest.mark.parametrize(
    "where", [[], pytest.param(["--in-place"], marks=pytest.mark.slow)], ids=["contained", "place"]
)
def test_the_script_does_not_outlive_a_killed_doctor(script, where):
    folder = script("import time\nprint('ready', flush=True)\ntime.sleep(600)\n")
    process = start(folder, *where, "train.py")
    process.kill()
    process.communicate()
    deadline = time.monotonic() + 100
    while leftovers(folder) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert leftovers(folder) == []


@pytest.mark.slow
def test_children_end_with_a_script_of_which_enough_was_seen(script):
    folder = script(TRAIN + HANGS + "while True: step()\n")
    done = doctor(folder, "--steps", "5", "train.py")
    assert done.returncode == 0, done.stdout + done.stderr
    assert leftovers(folder) == []


@pytest.mark.slow
@pytest.mark.parametrize("where", [[], ["--in-place"]])
def test_killed_by_the_system_is_said(script, where):
    folder = script("import os\nos.kill(os.getpid(), 9)\n")
    done = doctor(folder, *where, "train.py")
    assert done.returncode == 1
    assert "SIGKILL; out of memory?" in done.stdout


WRITES = """
from pathlib import Path
Path("log").write_text("new")
Path("made").mkdir()
Path("made/here").touch()
"""


@pytest.mark.parametrize(
    ("where", "log"), [([], "old"), pytest.param(["--in-place"], "new", marks=pytest.mark.slow)]
)
def test_what_the_script_writes_is_gone_afterwards_unless_it_runs_in_place(script, where, log):
    folder = script(WRITES)
    (folder / "log").write_text("old")
    assert doctor(folder, *where, "train.py").returncode == 0
    assert (folder / "log").read_text() == log
    assert (folder / "made/here").exists() == bool(where)


@pytest.mark.slow
def test_a_script_that_needs_the_network_is_told_how_to_get_it(script):
    folder = script("import socket\nsocket.create_connection(('203.0.113.1', 9), timeout=0.01)\n")
    done = doctor(folder, "train.py")
    assert done.returncode == 1
    assert "203.0.113.1" in done.stdout
    assert "train.py:2" in done.stdout
    assert "do: where it needs that; --in-place runs it as it is" in done.stdout


@pytest.mark.slow
def test_each_rank_of_torchrun_is_watched(script):
    folder = script(
        "import torch.distributed as dist\ndist.init_process_group('gloo')\n"
        + TRAIN
        + "torch.manual_seed(0)\nmodel = nn.parallel.DistributedDataParallel(model)\n"
        "data = torch.utils.data.TensorDataset(x, y)\n"
        "loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)\n"
        "for epoch in range(3):\n"
        "    torch.manual_seed(epoch)\n"
        "    for a, b in loader:\n"
        "        optimizer.zero_grad()\n"
        "        nn.functional.cross_entropy(model(a), b).backward()\n"
        "        optimizer.step()\n"
    )
    done = doctor(folder, "--json", "--", "torchrun", "--nproc-per-node", "2", "train.py")
    seen = json.loads(done.stdout)
    assert [rank["rank"] for rank in seen["observations"]] == [0, 1]
    assert [rank["steps"] for rank in seen["observations"]] == [24, 24]
    dangers = [found["name"] for found in seen["findings"] if found["kind"] == "danger"]
    assert done.returncode == (3 if dangers else 0)
    # Where the sampler is out of sight, that is said.
    assert "sampler_missing" in {*dangers, *dict(seen["unknown"])}
    assert leftovers(folder) == []
