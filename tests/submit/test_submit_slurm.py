"""Jobs on a real SLURM of two nodes, sent and watched by the commands."""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
import submit_schemas
import torch
from examples_as_jobs import EXAMPLES, check, example
from jobs import SMALL_JOB, job, state_of, until
from nasty import NASTY, TELL
from prepared import check as check_prepared
from prepared import command, kill_in_the_middle, small_files
from slurm_cluster import Cluster, missing
from submit_schemas import sbatch_errors

from flatout.measure import usable_cpus
from flatout.save.model_file import load_model
from flatout.submit import Ledger, send_once, target_of, write

pytestmark = [
    pytest.mark.root,
    pytest.mark.slow,
    pytest.mark.skipif(usable_cpus() < 2, reason="two nodes take two CPUs"),
]

PREEMPTS = """\
GresTypes=gpu
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=urgent Nodes=n1,n2 MaxTime=INFINITE State=UP PriorityTier=10
"""
MAIN = [sys.executable, "-c", "from flatout.cli.main import main; main()"]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    if missing():
        pytest.skip(f"not installed: {', '.join(missing())}")
    cluster = Cluster(tmp_path_factory.mktemp("slurm"), PREEMPTS)
    yield cluster
    cluster.stop()


@pytest.fixture
def flatout(cluster, tmp_path):
    root = tmp_path / "root"
    root.mkdir()
    shutil.copy(SMALL_JOB, root / "train.py")

    def run(*arguments, code=0):
        done = subprocess.run(
            [*MAIN, *arguments],
            cwd=root,
            env={**cluster.environment, "XDG_STATE_HOME": str(tmp_path / "state")},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout

    yield run
    for log in root.glob("submit/*/job.log"):  # shown where the test has failed
        print(log.read_text()[-2000:])
    cluster.clear()


def submit(flatout, *arguments):
    said = flatout(
        *("submit", "slurm", "--yes", "--json", "--shared", "/", "--threads", "1", *arguments)
    )
    return json.loads(said)


def until_step(sent, number):
    path = Path(sent["folder"], "code/step")
    until(lambda: path.exists() and int(path.read_text() or 0) >= number)


@pytest.mark.parametrize("by", ["a signal", pytest.param("the clock", marks=pytest.mark.long)])
def test_on_two_nodes_preempted_then_at_its_time_limit_and_gone_on(flatout, cluster, tmp_path, by):
    run = str(tmp_path / "run")
    asked = ("--nodes", "2", "--time", "1h", "--stop-ahead", "50s", "--checkpoints", run)
    sent = submit(flatout, *asked, "train.py", str(tmp_path / "cut.safetensors"), "--pause=2")
    until_step(sent, 3)
    found = state_of(flatout, sent["id"])
    assert (found["state"], found["nodes"], found["starts"]) == ("running", ["n[1-2]"], 1)
    urgent = cluster.ask(
        "sbatch", "--parsable", "-N2", "-p", "urgent", "-o/dev/null", "--wrap=sleep 1"
    )
    until(lambda: state_of(flatout, sent["id"])["state"] == "requeued")
    assert urgent
    until(lambda: state_of(flatout, sent["id"])["starts"] == 2)
    step = int(Path(sent["folder"], "code/step").read_text())
    until_step(sent, step + 1)
    if by == "the clock":
        # SLURM's limit is in minutes, and it looks every 30 s which jobs are near theirs.
        cluster.ask("scontrol", "update", f"JobId={sent['id']}", "TimeLimit=1")
    else:  # the warning that comes then
        cluster.ask("scancel", "--signal=USR1", sent["id"])
    until(lambda: state_of(flatout, sent["id"])["starts"] == 3)
    cluster.ask("scontrol", "update", f"JobId={sent['id']}", "TimeLimit=60")
    Path(sent["folder"], "code/hurry").touch()
    said = flatout("logs", sent["id"], "-f")
    assert said.count("resumed step") == 2
    assert "rank 0 of 2, node 0 of 2" in said
    ended = state_of(flatout, sent["id"])
    assert (ended["state"], ended["exit_code"], ended["starts"]) == ("succeeded", 0, 3)
    # The same without being stopped.
    whole = str(tmp_path / "whole.safetensors")
    other = submit(flatout, "--nodes", "2", "train.py", whole)
    assert "rank 1 of 2" in flatout("logs", other["id"], "-f")
    cut = load_model(str(tmp_path / "cut.safetensors"))
    torch.testing.assert_close(cut, load_model(whole), rtol=0, atol=0)


@pytest.mark.long
def test_srun_starts_a_server_on_a_node_of_its_own(cluster, tmp_path):
    out = [str(tmp_path / f"{name}.safetensors") for name in ("served", "alone")]
    strategy = ("--set", "world.strategy=parameter_server")
    for words, path in zip((("--devices", "2", "--servers", "1", *strategy), ()), out, strict=True):
        run = shlex.join([*MAIN, "run", *words, str(SMALL_JOB), path])
        nodes = ("-N2", "--ntasks-per-node=1") if words else ("-N1",)
        log = tmp_path / f"{len(nodes)}.log"
        where = (f"-D{tmp_path}", f"-o{log}")
        cluster.ask("sbatch", "--wait", *nodes, *where, "--wrap", f"srun {run}")
        assert ("servers: 1 on nodes of their own" in log.read_text()) == bool(words)
    torch.testing.assert_close(*map(load_model, out), rtol=1e-4, atol=2e-6)


@pytest.mark.long
def test_a_rank_that_fails_tells_why_and_is_not_started_again(flatout):
    sent = submit(flatout, "train.py", "none", "--fail=3")
    flatout("logs", sent["id"], "-f", code=1)
    found = state_of(flatout, sent["id"])
    assert (found["state"], found["exit_code"], found["starts"]) == ("failed", 1, 1)
    said = flatout("jobs", sent["id"])
    assert "failed (1)" in said
    assert "ValueError: no good at step 3" in said


def test_a_canceled_job_writes_its_checkpoint_and_stays_away(flatout, tmp_path):
    run = tmp_path / "run"
    price = ("--price", "0.68", "--currency", "USD")
    asked = ("--nodes", "2", "--checkpoints", str(run), *price)
    sent = submit(flatout, *asked, "train.py", "none", "--pause=0.5")
    until_step(sent, 3)
    (seen,) = json.loads(flatout("top", sent["id"], "--json"))["jobs"]
    assert [one["rank"] for one in seen["ranks"]] == [0, 1]
    assert all(one["lanes_ms"]["forward"] > 0 for one in seen["ranks"])
    found = state_of(flatout, sent["id"])
    assert found["cost"]["so_far"] == pytest.approx(2 * 0.68 * found["seconds"] / 3600)
    flatout("cancel", sent["id"])
    until(lambda: state_of(flatout, sent["id"])["state"] == "canceled")
    assert list((run / "checkpoints").glob("step-*"))
    time.sleep(2)
    assert state_of(flatout, sent["id"])["state"] == "canceled"


def test_a_job_canceled_by_scancel_is_canceled_after_slurm_has_forgotten_it(
    flatout, cluster, monkeypatch
):
    for name in ("SLURM_CONF", "PATH"):
        monkeypatch.setenv(name, cluster.environment[name])
    sent = submit(flatout, "train.py", "none", "--pause=0.5")
    until_step(sent, 3)
    cluster.ask("scancel", sent["id"])
    until(lambda: state_of(flatout, sent["id"])["state"] == "canceled")
    found = target_of("slurm").state("4000000000", Path(sent["folder"]))  # an unknown number
    assert found.state == "canceled", (found, Path(sent["folder"], "job.log").read_text())
    waiting = submit(flatout, "--option", "begin=now+1hour", "train.py", "none")
    cluster.ask("scancel", waiting["id"])
    found = target_of("slurm").state("4000000000", Path(waiting["folder"]))
    assert found.state == "canceled", found


def test_a_hundred_nasty_arguments_and_a_run_for_each_seed(flatout, cluster, tmp_path):
    (tmp_path / "root/tell.py").write_text(TELL.replace("'TOLD'", "'SLURM_ARRAY_TASK_ID'"))
    sent = submit(flatout, "--seeds", "1,2", "--option", "partition=all", "tell.py", *NASTY)
    until(lambda: state_of(flatout, sent["id"])["state"] == "succeeded")
    for seed in ("1", "2"):
        with open(f"{sent['folder']}/code/{seed}") as file:
            assert json.load(file) == [one.replace("{seed}", seed) for one in NASTY]
    assert flatout("logs", f"{sent['id']}_1") == ""
    # What tells how far the job is ends with it.
    scripts = [one.info["cmdline"] or [] for one in psutil.process_iter(["cmdline"])]
    spool = str(cluster.folder / "spool")
    assert not [one for one in scripts if any(word.startswith(spool) for word in one)]


@pytest.mark.long
@pytest.mark.parametrize("name", EXAMPLES)
def test_the_examples(name, flatout, tmp_path):
    _, words = example(name, tmp_path / "root", tmp_path / "shared")
    sent = submit(flatout, "--nodes", "2", *words)
    check(name, flatout("logs", sent["id"], "-f"), tmp_path / "shared")


@pytest.mark.long
def test_preparing_data_goes_on_where_it_was_killed(flatout, tmp_path):
    source, target = small_files(tmp_path / "parts"), tmp_path / "day" / "day.tfrecord"
    sent = submit(flatout, "--", *command(source, target))
    written = kill_in_the_middle(target)
    until(lambda: state_of(flatout, sent["id"])["state"] == "succeeded", 240)
    assert state_of(flatout, sent["id"])["starts"] == 2
    check_prepared(source, target, written)


def test_sbatch_understands_each_of_many_scripts(cluster, tmp_path, monkeypatch):
    assert [one for one in sbatch_errors(cluster, tmp_path) if one] == []
    right = submit_schemas.made
    monkeypatch.setattr(
        submit_schemas,
        "made",
        lambda *job: {"job.sbatch": right(*job)["job.sbatch"].replace("--nodes=", "--nodez=")},
    )
    assert "nodez" in next(sbatch_errors(cluster, tmp_path))[0]


def test_what_slurm_would_refuse_is_told_before_it_is_sent(flatout):
    done = flatout(
        *("submit", "slurm", "--yes", "--shared", "/", "--option", "partition=none", "train.py"),
        code=1,
    )
    assert "submitted" not in done
    assert json.loads(flatout("jobs", "--json"))["jobs"] == []


@pytest.mark.long
def test_one_yes_is_one_job_though_slurm_does_not_answer(cluster, tmp_path, monkeypatch):
    """The controller sleeps while the job is sent, and takes it when it wakes up."""
    for name, value in {**cluster.environment, "XDG_STATE_HOME": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    made = job(tmp_path)
    to = target_of("slurm")
    write(made, to)
    controller = cluster.daemons[1].pid
    os.kill(controller, signal.SIGSTOP)
    waking = threading.Timer(30, lambda: os.kill(controller, signal.SIGCONT))
    waking.start()
    try:
        sent = send_once(made, to, Ledger(), wait_s=60)
    finally:
        waking.join()
    jobs = cluster.ask("squeue", "-h", "--states=all", f"--name={made.name}", "-o", "%A").split()
    assert jobs == [sent.id]
    assert Ledger().find(sent.id).status == "sent"
