"""Unusual surroundings of a process, none of which ends a training."""

import os
import shutil
import subprocess
import sys

import pytest
from train_jobs import data, network, quiet

import flatout
from flatout.cache_folder import cache_folder

pytestmark = pytest.mark.usefixtures("one_thread")

FIT = """
import sys
import torch
import flatout

torch.set_num_threads(1)
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
x, y = torch.randn(64, 4), torch.randint(0, 2, (64,))
data = flatout.data.arrays(x.numpy(), y.numpy()).cache().batch(8)
trainer = flatout.Trainer(model, optimizer=optimizer, loss="cross_entropy", run=sys.argv[1])
trainer.fit(data, epochs=2, progress=False)
trainer.predict(x)
print("the script goes on")
"""


def without_rights_of_root(command):
    """Return a command that obeys file modes, even if root starts it."""
    if os.geteuid() != 0:
        return command
    if shutil.which("setpriv") is None:
        pytest.skip("setpriv is needed to give up rights of root")
    return ["setpriv", "--bounding-set=-dac_override,-dac_read_search", *command]


@pytest.mark.slow
@pytest.mark.parametrize("mode", [0o000, 0o444, 0o555])
def test_a_home_that_cannot_be_used_ends_no_training(tmp_path, mode):
    (tmp_path / "home").mkdir(mode=mode)
    (tmp_path / "temporary").mkdir()
    (tmp_path / "fit.py").write_text(FIT)
    environment = {name: v for name, v in os.environ.items() if not name.startswith("XDG_")}
    environment.pop("FLATOUT_CACHE")
    done = subprocess.run(
        without_rights_of_root([sys.executable, "fit.py", "run"]),
        cwd=tmp_path,
        env={**environment, "HOME": f"{tmp_path}/home", "TMPDIR": f"{tmp_path}/temporary"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "the script goes on" in done.stdout
    assert done.stderr.count("is not used") == 1
    assert (tmp_path / "run" / "profile.json").exists()


def test_a_fit_ends_well_where_nothing_can_be_kept(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FLATOUT_CACHE", str(tmp_path / "file"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / f"flatout-{os.geteuid()}").write_text("in the way")
    assert not cache_folder().exists()
    trainer = flatout.Trainer(network(), loss="cross_entropy", run=tmp_path / "run", say=quiet)
    history = trainer.fit(data(), batch_size=32, epochs=3, progress=False, validation_data=data())
    assert len(history.epochs) == 3
    trainer.evaluate(data(), batch_size=32)
    assert sorted(os.listdir(tmp_path)) == sorted(["file", f"flatout-{os.geteuid()}", "run"])


def test_a_profile_that_cannot_be_made_ends_no_training(tmp_path, monkeypatch):
    said = []
    trainer = flatout.Trainer(
        network(), loss="cross_entropy", run=tmp_path / "run", say=said.append
    )

    class InTheWay(flatout.Callback):
        def on_checkpoint(self, state, path):
            if not (tmp_path / "run" / "profile.json").exists():
                (tmp_path / "run" / "profile.json").mkdir()

    history = trainer.fit(data(), batch_size=32, epochs=2, progress=False, callbacks=[InTheWay()])
    assert len(history.epochs) == 2
    assert [line for line in said if "the Profile of the run cannot be written" in line]


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts an empty /proc")
def test_a_machine_without_proc_is_named(tmp_path):
    empty = ["unshare", "-m", "sh", "-c", 'mount -t tmpfs none /proc && exec "$@"', "sh"]
    if shutil.which("unshare") is None or subprocess.run([*empty, "true"], check=False).returncode:
        pytest.skip("this process may mount nothing")
    command = [sys.executable, "-c", "from flatout.cli.main import main; main()", "devices"]
    done = subprocess.run(
        [*empty, *command], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    assert "/proc, which is not mounted here" in done.stderr
    assert "Traceback" not in done.stderr
