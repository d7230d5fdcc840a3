"""`flatout run --devices 2`: ranks that train one model, and none is left hanging."""

import os
import re
import signal
import subprocess
import sys
import textwrap
import time

import pytest
import torch

from flatout.measure import usable_cpus
from flatout.save.model_file import load_model

pytestmark = pytest.mark.skipif(usable_cpus() < 2, reason="two ranks take two CPUs")

TRAIN = """
    import os, sys, time
    import numpy as np, torch, flatout

    class Slow(flatout.Callback):
        every = 1
        def on_step(self, state):
            open(f"step-{os.environ.get('RANK', '0')}", "w").write(str(state.step))
            time.sleep(0.01)

    rng = np.random.default_rng(1)
    x = rng.normal(size=(200, 20)).astype(np.float32)
    y = rng.integers(0, 5, 200)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(20, 32), torch.nn.ReLU(), torch.nn.Dropout(0.2),
                                torch.nn.Linear(32, 5))
    recipe = flatout.Recipe().replace({"save.every": 5})
    trainer = flatout.Trainer(model, lr=0.01, allow="exact", recipe=recipe, run=sys.argv[1])
    trainer.fit((x, y), batch_size=10, epochs=int(sys.argv[2]), callbacks=[Slow()],
                resume="resume" in sys.argv)
    trainer.save(sys.argv[1] + ".safetensors")
"""


def begin(folder, script, *arguments, devices=2):
    path = folder / "train.py"
    path.write_text(textwrap.dedent(script))
    call = "from flatout.cli.main import main; main()"
    command = [sys.executable, "-c", call, "run", "--devices", str(devices)]
    return subprocess.Popen(
        [*command, str(path), *arguments],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "FLATOUT_CACHE": str(folder / "cache")},
    )


def finish(job, timeout=120):
    try:
        out, error = job.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        job.kill()
        raise
    return job.returncode, out, error


def ranks_of(job):
    """The processes of the ranks, by rank."""
    found = {}
    listed = subprocess.run(
        ["ps", "-o", "pid=", "--ppid", str(job.pid)], capture_output=True, text=True, check=False
    )
    for pid in map(int, listed.stdout.split()):
        try:
            with open(f"/proc/{pid}/environ", "rb") as file:
                variables = file.read().decode(errors="replace").split("\0")
        except OSError:
            continue
        ranks = [one.partition("=")[2] for one in variables if one.startswith("RANK=")]
        if ranks:
            found[int(ranks[0])] = pid
    return found


def wait_for_step(folder, step, job):
    until = time.monotonic() + 60
    while time.monotonic() < until and job.poll() is None:
        try:
            if int((folder / "step-1").read_text() or 0) >= step:
                return
        except (OSError, ValueError):
            pass
        time.sleep(0.01)
    raise AssertionError(f"no step {step}: {finish(job)}")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Its weights, and what it said."""
    folder = tmp_path_factory.mktemp("undisturbed")
    code, _, error = finish(begin(folder, TRAIN, "runs", "2"))
    assert code == 0, error
    return load_model(str(folder / "runs.safetensors")), error


@pytest.fixture
def undisturbed(whole):
    return whole[0]


def same(weights, path):
    found = load_model(str(path))
    return all(torch.equal(found[name], weights[name]) for name in weights)


@pytest.mark.slow
def test_only_the_first_rank_speaks_and_writes(whole):
    assert len(re.findall(r"epoch 2/2", whole[1])) == 1


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.long)])
def test_after_a_kill_all_go_on_from_the_last_checkpoint(tmp_path, undisturbed, rank):
    job = begin(tmp_path, TRAIN, "runs", "2")
    wait_for_step(tmp_path, 17, job)
    os.kill(ranks_of(job)[rank], signal.SIGKILL)
    code, _, error = finish(job)
    assert code == 0, error
    assert f"rank {rank}" in error
    assert "was killed by SIGKILL; all ranks start again" in error
    assert "resumed step" in error
    assert same(undisturbed, tmp_path / "runs.safetensors")


@pytest.mark.slow
def test_a_stop_signal_reaches_all_and_leaves_a_checkpoint(tmp_path, undisturbed):
    job = begin(tmp_path, TRAIN, "runs", "2")
    wait_for_step(tmp_path, 12, job)
    job.send_signal(signal.SIGTERM)
    code, _, error = finish(job)
    assert code == 143, error
    assert error.count("-> checkpoint") == 1
    code, _, error = finish(begin(tmp_path, TRAIN, "runs", "2", "resume"))
    assert code == 0, error
    assert same(undisturbed, tmp_path / "runs.safetensors")


@pytest.mark.slow
def test_an_error_on_one_rank_ends_all_with_its_traceback_first(tmp_path):
    script = TRAIN.replace(
        "time.sleep(0.01)",
        "1 / (0 if state.step == 7 and os.environ['RANK'] == '1' else 1)",
    )
    # The other rank is not waited for until world.timeout ends.
    code, _, error = finish(begin(tmp_path, script, "runs", "2"))
    assert code == 1, error
    assert "rank 1 of 2" in error
    assert "ZeroDivisionError" in error
    assert error.count("Traceback (most recent call last)") == 1
    assert "rank 1 (process" in error
    assert "has ended with exit code 1; all ranks have ended" in error


@pytest.mark.slow
def test_a_script_that_never_joins_is_stopped_before_its_first_step(tmp_path):
    script = """
        import torch
        model = torch.nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            model(torch.ones(2, 3)).sum().backward()
            optimizer.step()
            print("stepped", flush=True)
    """
    code, out, error = finish(begin(tmp_path, script))
    assert code == 1, error
    assert "never joined the others" in error
    assert "stepped" not in out


@pytest.mark.slow
def test_replicas_that_differ_are_named(tmp_path):
    script = TRAIN.replace("torch.manual_seed(0)", "torch.manual_seed(int(os.environ['RANK']))")
    code, _, error = finish(begin(tmp_path, script, "runs", "1"))
    assert code == 1, error
    assert "the replicas differ at the start: 0.weight of rank 1" in error


def test_more_ranks_than_devices(tmp_path):
    code, _, error = finish(begin(tmp_path, TRAIN, "runs", "1", devices=999))
    assert code == 1
    assert "999 ranks were asked for, but this node has" in error
