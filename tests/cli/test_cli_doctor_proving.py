"""`flatout doctor script.py` and its trials: the question on a terminal, the proof, the Recipe."""

import json
import os
import pty
import select
import signal
import subprocess
import sys
import time

import pytest
from test_cli_doctor_script import leftovers

from flatout.recipe import load

FLATOUT = "import flatout.cli.main as m, sys; sys.argv[0] = 'flatout'; m.main()"

# Samples wait for a disk that is far away, and each step for a device: workers wait beside it, on
# any machine.
WAITS = """
import argparse, time, torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
arguments = argparse.ArgumentParser()
arguments.add_argument("--epochs", type=int, default=50)
epochs = arguments.parse_args().epochs
torch.set_num_threads(1)
torch.manual_seed(0)

class Far(Dataset):
    def __len__(self):
        return 96

    def __getitem__(self, at):
        time.sleep(0.003)
        return torch.full((8,), at / 96), at % 2

model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(Far(), batch_size=8, shuffle=True)
for epoch in range(epochs):
    for x, y in loader:
        optimizer.zero_grad()
        time.sleep(0.02)
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
torch.save(model.state_dict(), "model.pt")
if epochs < 0:
    import wandb
    wandb.init()
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "train.py").write_text(WAITS)
    return tmp_path


def command(*arguments):
    return [sys.executable, "-c", FLATOUT, "doctor", *arguments]


class Terminal:
    """The doctor on its own terminal, of 100 columns."""

    def __init__(self, folder, *arguments):
        self._own, theirs = pty.openpty()
        self.text = ""
        self.process = subprocess.Popen(
            command(*arguments),
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            cwd=folder,
            env={**os.environ, "COLUMNS": "100", "TERM": "dumb"},
            start_new_session=True,
        )
        os.close(theirs)

    def until(self, said, within_s=120.0):
        """Reads until that is said."""
        deadline = time.monotonic() + within_s
        while said not in self.text:
            assert time.monotonic() < deadline, self.text
            assert self._read(deadline), self.text
        return self

    def types(self, line):
        os.write(self._own, line.encode())
        return self

    def ends(self, within_s=120.0):
        """Reads to the end; returns the exit code."""
        while self._read(time.monotonic() + within_s):
            pass
        os.close(self._own)
        return self.process.wait(within_s)

    def _read(self, deadline):
        ready, _, _ = select.select([self._own], [], [], max(deadline - time.monotonic(), 0))
        try:
            read = os.read(self._own, 65536) if ready else b""
        except OSError:  # the other end is closed
            return False
        self.text += read.decode(errors="replace").replace("\r\n", "\n")
        return bool(read)


@pytest.mark.slow
def test_a_terminal_is_asked_and_no_is_an_answer(folder):
    seen = Terminal(folder, "--steps", "20", "train.py").until("[Y/n]").types("n\n")
    assert seen.ends() == 0
    asked, answered = seen.text.split("[Y/n]")
    assert "FIRST LOOK at 20 steps" in asked
    words = " ".join(asked.split())
    assert "to prove: about" in words
    assert "short reruns in a scratch copy, 2m00s at most." in words
    assert "Offline during trials: Weights & Biases." in words
    assert "flatout doctor --yes train.py" in answered
    assert "PROVEN" not in seen.text
    assert not (folder / "flatout.toml").exists()


@pytest.mark.slow
@pytest.mark.parametrize("more", [["--json"], []])
def test_nothing_is_asked_without_a_terminal_or_a_wish(folder, more):
    done = subprocess.run(
        command(*more, "--steps", "20", "train.py"),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stderr
    assert "[Y/n]" not in done.stdout + done.stderr
    if "--json" in more:
        assert json.loads(done.stdout)["prescription"] is None
    else:
        assert "flatout doctor --yes train.py" in done.stdout


@pytest.mark.slow
def test_yes_is_proven_written_down_and_run_by(folder):
    own = ["--steps", "24", "--budget", "60s", "--page", "page.html"]
    seen = Terminal(folder, *own, "train.py", "--epochs", "40")
    assert seen.until("[Y/n]").types("\n").ends() == 0
    if "in the time given" in seen.text or "no time was left" in seen.text:
        pytest.skip("this machine is too busy to prove anything in a minute")
    _, proven = seen.text.split("PROVEN  (A/A noise")
    assert "workers 0 to " in proven
    assert "480 steps: " in proven
    assert "next  flatout run --recipe flatout.toml train.py --epochs 40" in proven
    assert leftovers(folder) == []
    assert not (folder / "model.pt").exists()
    recipe = load(folder / "flatout.toml")
    assert recipe.proven_for == "train.py --epochs 40"
    # Samples that are kept need no workers, if there was time to find that out.
    cured = recipe.choices.keys() & {"input.workers", "script.cache"}
    assert cured
    assert all(recipe.choices[name].low > 1 for name in cured)
    assert "With what was proven your whole run takes" in (folder / "page.html").read_text()
    ran = subprocess.run(
        [
            sys.executable,
            "-c",
            FLATOUT,
            "run",
            "--recipe",
            "flatout.toml",
            "train.py",
            "--epochs",
            "1",
        ],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ran.returncode == 0, ran.stderr
    words = {"input.workers": f"workers={recipe.input.workers}", "script.cache": "cache=memory"}
    applied = [line for line in ran.stderr.splitlines() if line.startswith("applied: ")][-1]
    assert all(words[name] in applied for name in cured), applied
    assert (folder / "model.pt").exists()


@pytest.mark.slow
def test_ctrl_c_in_the_trials_tells_what_was_proven_until_then(folder):
    seen = Terminal(folder, "--steps", "24", "--yes", "train.py").until("for the noise ...")
    seen.process.send_signal(signal.SIGINT)
    assert seen.ends() == 130
    assert "stopped       stopped by Ctrl-C" in seen.text
    assert "not tried" in seen.text
    assert leftovers(folder) == []


@pytest.mark.parametrize(
    "wrong",
    [["--yes", "--no-trials"], ["--budget", "soon"], ["--budget", "0"], ["--allow", "learning"]],
)
def test_wrong_wishes_are_refused(folder, wrong, monkeypatch):
    from typer.testing import CliRunner

    from flatout.cli.main import app

    monkeypatch.chdir(folder)
    done = CliRunner().invoke(app, ["doctor", *wrong, "train.py"])
    assert done.exit_code == 2
    assert wrong[0] in done.output
