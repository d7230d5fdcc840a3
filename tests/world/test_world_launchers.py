"""Ranks that torchrun, Open MPI, MPICH and SLURM have started, where these are installed."""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from slurm_cluster import Cluster, missing

from flatout.measure import usable_cpus
from flatout.save.model_file import load_model

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(usable_cpus() < 2, reason="two ranks take two CPUs"),
]


def begin():
    return [sys.executable, str(Path(__file__).with_name("small_job.py"))]


def run(folder, *command):
    return subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "FLATOUT_CACHE": str(folder / "cache")},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    done = run(folder, *begin(), "alone.safetensors")
    assert done.returncode == 0, done.stderr
    return load_model(str(folder / "alone.safetensors"))


def check(folder, alone):
    found = load_model(str(folder / "together.safetensors"))
    torch.testing.assert_close(found, alone, rtol=1e-4, atol=2e-6)


MPI = {
    "openmpi": ["-n", "2", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none"],
    "mpich": ["-n", "2"],
}


@pytest.mark.parametrize("kind", MPI)
def test_mpirun(tmp_path, alone, kind):
    mpirun = shutil.which(f"mpirun.{kind}")
    if mpirun is None:
        pytest.skip(f"mpirun.{kind} is not installed")
    done = run(tmp_path, mpirun, *MPI[kind], *begin(), "together.safetensors")
    assert done.returncode == 0, done.stderr
    for rank in (0, 1):
        assert f"rank {rank} of 2, started by mpirun" in done.stdout
    check(tmp_path, alone)


def test_torchrun(tmp_path, alone):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    job = [*begin()[1:], "together.safetensors"]
    done = run(tmp_path, *torchrun, "--nproc-per-node", "2", *job)
    assert done.returncode == 0, done.stderr
    for rank in (0, 1):
        assert f"rank {rank} of 2, started by torchrun" in done.stdout
    check(tmp_path, alone)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    if missing():
        pytest.skip(f"not installed: {', '.join(missing())}")
    cluster = Cluster(tmp_path_factory.mktemp("slurm"))
    yield cluster
    cluster.stop()


@pytest.mark.root
def test_srun_on_two_nodes(tmp_path, alone, cluster):
    job = [*begin(), "together.safetensors"]
    done = cluster.run("srun", "-N2", "-n2", *job, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for rank in (0, 1):
        assert f"rank {rank} of 2, node {rank} of 2, started by srun" in done.stdout
    check(tmp_path, alone)


BATCH = """\
#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=1 --requeue --open-mode=append --output=job.out
#SBATCH --signal=USR1@60

srun {command}
code=$?
if ((code == 138)); then scontrol requeue "$SLURM_JOB_ID"; fi
exit "$code"
"""


@pytest.mark.root
def test_a_job_that_is_warned_of_its_time_limit_goes_on_in_the_next(tmp_path, alone, cluster):
    """The recipe of docs/ranks.md; SLURM's warning comes from scancel, as from its own clock."""
    command = " ".join([*begin(), "together.safetensors", "--pause=0.05", "--run=runs"])
    (tmp_path / "job.sh").write_text(BATCH.format(command=command))
    number = cluster.run("sbatch", "--parsable", "job.sh", cwd=tmp_path).stdout.strip()
    assert number.isdigit()
    until = time.monotonic() + 60
    while time.monotonic() < until:
        if (tmp_path / "step").exists() and int((tmp_path / "step").read_text() or 0) >= 5:
            break
        time.sleep(0.05)
    cluster.ask("scancel", "--signal=USR1", number)
    until = time.monotonic() + 100
    while time.monotonic() < until and cluster.ask("squeue", "-h", "-j", number).strip():
        time.sleep(0.5)
    said = (tmp_path / "job.out").read_text()
    assert "SIGUSR1 step" in said
    assert "exit 138" in said
    assert "resumed step" in said
    check(tmp_path, alone)
