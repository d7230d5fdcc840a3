"""Jobs on two hosts with their own networks: over ssh, and by mpirun, which goes there by ssh."""

import json
import os
import shutil
import subprocess
import sys

import pytest
import torch
from examples_as_jobs import EXAMPLES, check, example
from jobs import SMALL_JOB, state_of, until
from nasty import NASTY, TELL
from prepared import check as check_prepared
from prepared import command, kill_in_the_middle, small_files
from ssh_hosts import SshHosts, missing
from two_hosts import ADDRESSES
from world_ranks import free_port

from flatout.measure import usable_cpus
from flatout.save.model_file import load_model

pytestmark = [
    pytest.mark.root,
    pytest.mark.slow,
    pytest.mark.skipif(usable_cpus() < 2, reason="two hosts take two CPUs"),
]
MAIN = [sys.executable, "-c", "from flatout.cli.main import main; main()"]


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    why = missing()
    if why:
        pytest.skip(why)
    with SshHosts(tmp_path_factory.mktemp("ssh")) as hosts:
        yield hosts


@pytest.fixture
def flatout(hosts, tmp_path):
    root = tmp_path / "root"
    root.mkdir()
    shutil.copy(SMALL_JOB, root / "train.py")
    (root / "tell.py").write_text(TELL)
    mpi = {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_plm_rsh_agent": f"ssh -F {hosts.config}",
        "OMPI_MCA_btl_tcp_if_include": "eth0",
        "OMPI_MCA_oob_tcp_if_include": "eth0",
        "HYDRA_LAUNCHER_EXEC": str(hosts.ssh),  # of MPICH
    }

    def run(*arguments, code=0):
        done = subprocess.run(
            [*hosts.before, *MAIN, *arguments],
            cwd=root,
            env={**os.environ, **mpi, "XDG_STATE_HOME": str(tmp_path / "state")},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout if code == 0 else done.stdout + done.stderr

    return run


def over_ssh(hosts, tmp_path, port):
    given = {
        "hosts": "host1,host2",
        "config": str(hosts.config),
        "rendezvous": f"{ADDRESSES[0]}:{port}",
        "folder": str(tmp_path / "there"),
    }
    return ["ssh", *(word for name, value in given.items() for word in
                     ("--option", f"{name}={value}"))]  # fmt: skip


def by_mpirun(kind, port):
    given = {"hosts": ",".join(ADDRESSES), "port": port, "mpirun": f"mpirun.{kind}", "kind": kind}
    options = [word for name, value in given.items() for word in ("--option", f"{name}={value}")]
    return ["mpi", "--shared", "/", *options]


@pytest.fixture(params=["ssh", "openmpi"])
def submit(request, flatout, hosts, tmp_path):
    kind = request.param
    if kind != "ssh" and shutil.which(f"mpirun.{kind}") is None:
        pytest.skip(f"mpirun.{kind} is not installed")

    def send(*arguments, code=0):
        port = free_port()
        way = over_ssh(hosts, tmp_path, port) if kind == "ssh" else by_mpirun(kind, port)
        options = ("--nodes", "2", "--threads", "1", "--yes", "--json")
        said = flatout("submit", *way, *options, *arguments, code=code)
        return json.loads(said) if code == 0 else said

    return send


@pytest.mark.parametrize(
    "submit", ["ssh", pytest.param("openmpi", marks=pytest.mark.long)], indirect=True
)
def test_two_hosts_train_one_model(flatout, submit, tmp_path):
    sent = submit("train.py", str(tmp_path / "out.safetensors"))
    said = flatout("logs", sent["id"], "-f")
    for rank in (0, 1):
        assert f"rank {rank} of 2, node {rank} of 2, started by torchrun eth0" in said
    found = state_of(flatout, sent["id"])
    assert (found["state"], found["exit_code"]) == ("succeeded", 0)
    alone = str(tmp_path / "alone.safetensors")
    subprocess.run([sys.executable, "train.py", alone], cwd=tmp_path / "root", check=True)
    found = load_model(str(tmp_path / "out.safetensors"))
    torch.testing.assert_close(found, load_model(alone), rtol=1e-4, atol=2e-6)
    # The secret is in no file.
    folder = tmp_path / "there" if (tmp_path / "there").exists() else tmp_path / "root/submit"
    texts = [path.read_bytes() for path in folder.rglob("*") if path.is_file()]
    assert not any(b"FLATOUT_SECRET=0" in one for one in texts)


@pytest.mark.long
def test_a_rank_that_fails_tells_why(flatout, submit):
    sent = submit("train.py", "none", "--fail=3")
    flatout("logs", sent["id"], "-f", code=1)
    assert (state_of(flatout, sent["id"])["state"]) == "failed"
    assert "ValueError: no good" in flatout("jobs", sent["id"])


def ranks_in_top(flatout, id):
    jobs = json.loads(flatout("top", id, "--json"))["jobs"]
    return [one["rank"] for job in jobs for one in job["ranks"] if one["lanes_ms"]]


@pytest.mark.long
def test_a_canceled_job_writes_its_checkpoint(flatout, submit, tmp_path):
    run = tmp_path / "run"
    sent = submit("--checkpoints", str(run), "train.py", "none", "--pause=0.5")
    until(lambda: any(one.stat().st_size for one in tmp_path.rglob("step")))
    until(lambda: len(ranks_in_top(flatout, sent["id"])) == 2)
    assert state_of(flatout, sent["id"])["state"] == "running"
    flatout("cancel", sent["id"])
    until(lambda: state_of(flatout, sent["id"])["state"] == "canceled")
    assert list((run / "checkpoints").glob("step-*"))


@pytest.mark.parametrize("submit", ["ssh", "openmpi", "mpich"], indirect=True)
def test_a_hundred_nasty_arguments(flatout, submit, tmp_path):
    told = tmp_path / "told"
    sent = submit("--env", f"TOLD={told}", "tell.py", *NASTY)
    flatout("logs", sent["id"], "-f")
    assert json.loads(told.read_text()) == NASTY


@pytest.mark.long
@pytest.mark.parametrize("name", EXAMPLES)
def test_the_examples(name, flatout, submit, tmp_path):
    _, words = example(name, tmp_path / "root", tmp_path / "shared")
    sent = submit(*words)
    check(name, flatout("logs", sent["id"], "-f"), tmp_path / "shared")


@pytest.mark.long
def test_preparing_data_goes_on_where_it_was_killed(flatout, hosts, tmp_path):
    """When it is sent once more: hosts without a queue start nothing again by themselves."""
    source, target = small_files(tmp_path / "parts"), tmp_path / "day" / "day.tfrecord"
    ssh = ["--option", "hosts=host1", "--option", f"config={hosts.config}"]
    folder = ["--option", f"folder={tmp_path / 'there'}"]
    words = ["submit", "ssh", "--yes", "--json", *ssh, *folder, "--", *command(source, target)]
    sent = json.loads(flatout(*words))
    written = kill_in_the_middle(target)
    until(lambda: state_of(flatout, sent["id"])["state"] == "failed")
    assert state_of(flatout, sent["id"])["exit_code"] == 137
    flatout("logs", json.loads(flatout(*words))["id"], "-f")
    check_prepared(source, target, written)


def test_a_host_that_lacks_something_is_named_before_anything_is_sent(flatout, hosts, tmp_path):
    way = over_ssh(hosts, tmp_path, 29500)
    options = ("--nodes", "2", "--threads", "1", "--yes", "--input", "/nowhere/day.svm")
    said = flatout("submit", *way, *options, "--option", "bin=/opt/none", "train.py", code=1)
    for host in ("host1", "host2"):
        assert f"{host}: not there: /nowhere/day.svm" in said
        assert f"{host}: expected flatout" in said
    assert not (tmp_path / "there").exists()
