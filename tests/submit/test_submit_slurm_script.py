"""Tests without a cluster of SLURM's batch script, and of jobs that SLURM has forgotten."""

import os
import subprocess
from itertools import pairwise

import pytest
from jobs import job

from flatout.submit import target_of


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """Return the target, whose SLURM has forgotten every job."""
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    for name, text in (("scancel", "exit 0"), ("scontrol", "echo Invalid job id >&2; exit 1")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    return target_of("slurm")


def test_a_forgotten_job_without_a_log_was_canceled_before_it_started(tmp_path, slurm):
    for id in ("7", "7_1"):
        found = slurm.state(id, tmp_path)
        assert (found.state, found.words[:16]) == ("canceled", "it never started")
    (tmp_path / "job-1.log").touch()  # of an array, in which task 1 alone has started
    assert [slurm.state(id, tmp_path).state for id in ("7", "7_1", "7_2")] == [
        *("ended", "ended", "canceled")
    ]
    assert slurm.state("7", tmp_path / "deleted").state == "ended"


def test_a_job_that_was_canceled_and_forgotten_is_not_lost(tmp_path, slurm):
    for log in ("job.log", "job-1.log"):
        (tmp_path / log).touch()
    assert slurm.state("7", tmp_path).state == "ended"
    slurm.cancel("7", tmp_path)
    assert slurm.state("7", tmp_path).state == "canceled"
    assert slurm.state("7_1", tmp_path).state == "canceled"


def test_memory_is_requested_or_explained(tmp_path):
    given = target_of("slurm").artifacts(job(tmp_path, options=("mem=16G",)))[0].text
    assert given.count("--mem=") == 1
    left = target_of("slurm").artifacts(job(tmp_path))[0].text
    assert "--option mem=16G" in left
    assert "#SBATCH --mem" not in left
    whole = target_of("slurm").artifacts(job(tmp_path, devices=None, threads=None))[0].text
    assert "#SBATCH --mem=0" in whole


BY_SLURM = "slurmstepd-n1: error: *** JOB 7 ON n1 CANCELLED AT 2026-11-30T00:57:53{} ***\n"


@pytest.mark.parametrize(
    ("log", "state"),
    [
        (BY_SLURM.format(""), "canceled"),
        (BY_SLURM.format(" DUE TO JOB REQUEUE") + "again\n" + BY_SLURM.format(""), "canceled"),
        (BY_SLURM.format("").replace("JOB 7", "STEP 7.0"), "ended"),
        (BY_SLURM.format(" DUE TO TIME LIMIT"), "failed"),
        (BY_SLURM.format(" DUE TO JOB REQUEUE"), "ended"),
        (f"the script says: {BY_SLURM.format('')}", "ended"),
        ("step 3\n", "ended"),
    ],
)
def test_the_log_of_a_forgotten_job_gives_the_reason_of_its_end(tmp_path, slurm, log, state):
    for name in ("job.log", "job-2.log"):
        (tmp_path / name).write_text(f"{'a line' * 100_000}\n{log}\xe9 last\n", encoding="latin-1")
    assert slurm.state("7", tmp_path).state == state
    assert slurm.state("7_2", tmp_path).state == state


def test_the_exit_code_of_an_earlier_start_is_not_that_of_a_forgotten_job(tmp_path, slurm):
    for name, text, when in (("exit_code", "143", 100), ("started", "", 200)):
        (tmp_path / name).write_text(text)
        os.utime(tmp_path / name, (when, when))
    (tmp_path / "job.log").write_text(BY_SLURM.format(""))
    assert slurm.state("7", tmp_path).state == "canceled"
    os.utime(tmp_path / "exit_code", (300, 300))
    found = slurm.state("7", tmp_path)
    assert (found.state, found.exit_code, found.since_s) == ("failed", 143, 100)


# Replacements of Bash's clock and sleep, in which 80 half minutes pass at once.
CLOCK = """
sleep() { SECONDS=$((SECONDS + 30)); ((++looks <= 80)); }
scontrol() { echo "$SECONDS" >> told; }
here=$PWD
export SLURM_JOB_ID=7
echo '{"remaining_s": 5400}' > remaining
"""


def test_the_controller_is_called_once_in_five_minutes(tmp_path):
    text = target_of("slurm").artifacts(job(tmp_path))[0].text
    _, _, rest = text.partition("# What is left of it")
    loop, _, _ = rest.partition("trap ")
    command = ["bash", "-c", f"{CLOCK}#{loop}wait"]
    subprocess.run(command, cwd=tmp_path, check=True, timeout=60)
    told = [int(line) for line in (tmp_path / "told").read_text().split()]
    assert len(told) == 8  # in 40 minutes
    assert all(later - earlier >= 300 for earlier, later in pairwise(told))
