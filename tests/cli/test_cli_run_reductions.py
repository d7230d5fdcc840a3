"""`flatout run --devices 2 --set world.reduction=...`: a script trains with it."""

import os
import signal
import subprocess
import sys
import textwrap
import time

import psutil
import pytest
import torch

from flatout.measure import usable_cpus
from flatout.save.model_file import load_model

pytestmark = pytest.mark.skipif(usable_cpus() < 2, reason="two ranks take two CPUs")

TRAIN = """
    import os, sys, time
    import numpy as np, torch, flatout

    class Look(flatout.Callback):
        every = 1
        def on_step(self, state):
            open("step-" + os.environ["RANK"], "w").write(str(state.step))
            if SLOW:
                time.sleep(0.02)

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = torch.nn.Linear(20, 64), torch.nn.Linear(64, 5)
            self.calls = 0
        def forward(self, x):
            hidden = torch.relu(self.first(x))
            if hidden.requires_grad:
                self.calls += 1
                hidden.register_hook(self.in_backward)
            return self.last(hidden)
        def in_backward(self, gradient):
            if FAILS and self.calls > 9 and os.environ["RANK"] == "1":
                raise ValueError("in the middle of backward")

    rng = np.random.default_rng(1)
    x = rng.normal(size=(200, 20)).astype(np.float32)
    y = rng.integers(0, 5, 200)
    torch.manual_seed(0)
    recipe = flatout.Recipe().replace({"save.every": 5})
    trainer = flatout.Trainer(Model(), lr=0.01, allow="exact", recipe=recipe, run="runs")
    trainer.fit((x, y), batch_size=10, epochs=2, callbacks=[Look()])
    trainer.save("end.safetensors")
"""


def begin(folder, *settings, slow=False, fails=False):
    path = folder / "train.py"
    path.write_text(f"SLOW, FAILS = {slow}, {fails}\n" + textwrap.dedent(TRAIN))
    call = "from flatout.cli.main import main; main()"
    asked = [word for setting in settings for word in ("--set", setting)]
    return subprocess.Popen(
        [sys.executable, "-c", call, "run", "--devices", "2", *asked, str(path)],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "FLATOUT_CACHE": str(folder / "cache")},
    )


def finish(job):
    try:
        _, error = job.communicate(timeout=120)
    except subprocess.TimeoutExpired:
        job.kill()
        raise
    return job.returncode, error


def weights(folder):
    return load_model(str(folder / "end.safetensors"))


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plain")
    code, error = finish(begin(folder))
    assert code == 0, error
    return weights(folder)


@pytest.mark.slow
def test_what_cannot_be_had_together_is_an_error_before_training(tmp_path):
    code, error = finish(begin(tmp_path, "world.reduction=ring", "world.compression=bf16"))
    assert code == 1, error
    assert "reduction=ring cannot be had with it" in error
    assert not (tmp_path / "step-0").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("setting", "close"),
    [
        ("world.reduction=ring", 1e-5),
        ("world.reduction=hierarchical", 1e-5),
        pytest.param("world.compression=bf16", 1e-1, marks=pytest.mark.long),
    ],
)
def test_a_script_trains_as_with_plain_sums(tmp_path, plain, setting, close):
    code, error = finish(begin(tmp_path, setting))
    assert code == 0, error
    torch.testing.assert_close(weights(tmp_path), plain, rtol=close, atol=close)
    assert ("there is one node" in error) == ("hierarchical" in setting)


@pytest.mark.slow
@pytest.mark.long
def test_after_a_kill_powersgd_goes_on_with_its_errors(tmp_path):
    for name in ("undisturbed", "killed"):
        (tmp_path / name).mkdir()
    setting = "world.compression=powersgd"
    code, error = finish(begin(tmp_path / "undisturbed", setting))
    assert code == 0, error
    job = begin(tmp_path / "killed", setting, slow=True)
    step, until = tmp_path / "killed" / "step-1", time.monotonic() + 60
    while not (step.exists() and int(step.read_text() or 0) >= 17) and time.monotonic() < until:
        time.sleep(0.01)
    ranks = [p for p in psutil.Process(job.pid).children() if p.environ().get("RANK") == "1"]
    os.kill(ranks[0].pid, signal.SIGKILL)
    code, error = finish(job)
    assert code == 0, error
    assert "resumed step" in error
    expected = weights(tmp_path / "undisturbed")
    torch.testing.assert_close(weights(tmp_path / "killed"), expected, rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "setting",
    [
        "world.reduction=ring",
        pytest.param("world.compression=powersgd", marks=pytest.mark.long),
    ],
)
def test_an_error_while_others_wait_for_a_sum_ends_all(tmp_path, setting):
    code, error = finish(begin(tmp_path, setting, fails=True))
    assert code == 1, error
    assert error.count("Traceback (most recent call last)") == 1
    assert "ValueError: in the middle of backward" in error
