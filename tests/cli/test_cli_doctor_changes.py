"""`flatout doctor --diff` and `--fix` on a real script."""

import re
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from flatout.cli.main import app

FLATOUT = "import flatout.cli.main as m, sys; sys.argv[0] = 'flatout'; m.main()"

TRAIN = """
import gc, sys, torch
from torch import nn
torch.set_num_threads(1)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 64), nn.Dropout(0.5), nn.Linear(64, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x, y = torch.randn(32, 8), torch.randint(0, 2, (32,))
held = [[i] for i in range(100_000)]
for epoch in range(3):
    for step in range(10):
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        gc.collect()
    with torch.no_grad():
        right = model(x)
torch.save(model.state_dict(), sys.argv[1])
"""


def run(folder, *command):
    done = subprocess.run([*command], cwd=folder, capture_output=True, timeout=120)
    assert done.returncode in (0, 3), done.stderr
    return done


@pytest.mark.slow
def test_the_diff_goes_on_to_git_and_the_fix_trains_the_same_bits(tmp_path):
    import torch

    (tmp_path / "train.py").write_text(TRAIN)
    options = ("--no-trials", "--diff", "--fix")
    doctor = (sys.executable, "-c", FLATOUT, "doctor", *options)
    done = run(tmp_path, *doctor, "train.py", "seen.pt")
    assert done.returncode == 3  # a danger, whatever is done about it
    words = done.stderr.decode()
    assert "FIRST LOOK" in words
    assert "changed 1 file:\n  train.py:16 garbage_each_step (bit-identical)" in words
    # Only what changes no bit was written.
    assert (tmp_path / "train.py").read_text() == TRAIN.replace("        gc.collect()\n", "")
    (tmp_path / "before.py").write_text(TRAIN)
    for name in ("before", "train"):
        run(tmp_path, sys.executable, f"{name}.py", f"{name}.pt")
    before, after = (torch.load(tmp_path / f"{name}.pt") for name in ("before", "train"))
    assert all(torch.equal(before[name], after[name]) for name in before)
    undo = re.search(r"^undo  (.*)$", words, re.MULTILINE)[1]
    subprocess.run(undo, shell=True, check=True, capture_output=True)
    assert (tmp_path / "train.py").read_text() == TRAIN
    # The diff has the danger's cure too, and nothing beside it is on standard output.
    subprocess.run(["git", "apply"], input=done.stdout, cwd=tmp_path, check=True)
    evaluated = (
        "    model.eval()\n    with torch.no_grad():\n        right = model(x)\n    model.train()"
    )
    changed = (tmp_path / "train.py").read_text()
    assert evaluated in changed
    assert "gc.collect" not in changed


def test_json_takes_no_diff(tmp_path):
    (tmp_path / "train.py").write_text("")
    for option in ("--diff", "--fix"):
        done = CliRunner().invoke(app, ["doctor", "--json", option, str(tmp_path / "train.py")])
        assert done.exit_code == 2
        assert "--json has the changes in it already" in " ".join(done.output.split())
