"""`--devices auto`: how many ranks a script is fastest on."""

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner

from flatout.cli.main import app
from flatout.measure import Profile
from flatout.world.choose import Speed, candidates, fastest

FLATOUT = [sys.executable, "-c", "from flatout.cli.main import main; main()", "run"]
SCRIPT = """
import sys
from pathlib import Path

import torch
from torch import nn

import flatout
from flatout.train.callbacks import BestCheckpoint

torch.manual_seed(0)
with Path("started").open("a") as started:
    started.write("x")
x = torch.randn(640, 20)
model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 3))
trainer = flatout.Trainer(model, loss="cross_entropy", optimizer="sgd", lr=0.1, run="runs/it")
best = BestCheckpoint("loss")  # which a trial lets write nothing
trainer.fit(
    x, x[:, :3].argmax(1), batch_size=64, epochs=3, callbacks=[best], progress=False
)
if trainer.world().is_first:
    with Path("ended").open("a") as ended:
        ended.write(f"{trainer.world().size}\\n")
"""


@pytest.mark.parametrize(
    ("speeds", "ranks"),
    [
        ([Speed(1, 10, 10), Speed(2, 18, 18)], 2),
        ([Speed(1, 10, 10), Speed(2, 10.2, 10.2)], 1),  # below any floor
        ([Speed(1, 10, 14), Speed(2, 15, 15)], 1),  # below the noise of this machine
        ([Speed(1, 10, 10), Speed(2, 18, 18), Speed(4, 16, 16)], 2),
        ([Speed(1, 10, 10), Speed(2, 9, 9), Speed(4, 16, 16)], 4),
    ],
)
def test_more_ranks_only_where_they_are_faster_beyond_the_noise(speeds, ranks):
    assert fastest(speeds).ranks == ranks


def test_candidates_begin_with_one_rank_and_end_with_all_devices():
    found = candidates()
    assert found[0] == 1
    assert found == sorted(set(found))


@pytest.mark.parametrize("devices", ["0", "-1", "two", "1.5", "\u00b2"])
def test_what_is_no_number_of_ranks_is_wrong_usage(tmp_path, devices):
    (tmp_path / "train.py").write_text("")
    found = CliRunner().invoke(app, ["run", "--devices", devices, str(tmp_path / "train.py")])
    assert found.exit_code == 2
    words = " ".join(found.output.replace("│", " ").split())
    assert "expected a whole number above 0, or auto" in words


def run_auto(folder, script):
    Path(folder / "train.py").write_text(script)
    return subprocess.run(
        [*FLATOUT, "--devices", "auto", "train.py"],
        cwd=folder,
        env={**os.environ, "FLATOUT_CACHE": str(folder / "cache")},
        capture_output=True,
        text=True,
        timeout=240,
    )


@pytest.mark.slow
@pytest.mark.skipif(candidates() == [1], reason="one device alone leaves nothing to choose")
@pytest.mark.long
def test_the_script_is_measured_then_run_once_to_its_end(tmp_path):
    found = run_auto(tmp_path, SCRIPT)
    assert found.returncode == 0, found.stderr
    tried = candidates()
    assert found.stderr.count("steps/s") == len(tried)
    chosen = int((tmp_path / "ended").read_text())  # one line: no trial came to its end
    assert chosen in tried
    assert len((tmp_path / "started").read_text()) == 2 * sum(tried) + chosen
    assert "<- chosen" in found.stderr
    assert (tmp_path / "runs/it/history.json").exists()
    rates = Profile.read(tmp_path / "runs/it").world["steps_per_s_by_ranks"]
    assert sorted(map(int, rates)) == tried
    left = [p for p in psutil.process_iter(["cwd"]) if p.info["cwd"] == str(tmp_path)]
    assert not left
    # The run folder belongs to that run now, and the answer is kept: one rank less to start.
    again = run_auto(tmp_path, SCRIPT)
    assert "as measured before" in again.stderr
    assert "has checkpoints of an earlier fit" in again.stderr


@pytest.mark.slow
@pytest.mark.skipif(candidates() == [1], reason="one device alone leaves nothing to choose")
def test_a_script_that_does_not_train_is_named_with_its_last_words(tmp_path):
    found = run_auto(tmp_path, "raise ValueError('no such file: data.bin')")
    assert found.returncode == 1
    assert "did not train" in found.stderr
    assert "no such file: data.bin" in found.stderr
