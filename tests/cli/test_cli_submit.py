"""`flatout submit`, `jobs`, `logs` and `cancel` where no cluster is asked."""

import json
import os
import subprocess
import sys

import pytest

MAIN = [sys.executable, "-c", "from flatout.cli.main import main; main()"]


@pytest.fixture
def flatout(tmp_path):
    root = tmp_path / "root"
    root.mkdir()
    (root / "train.py").write_text("print('here')\n")

    def run(*arguments, **variables):
        state = {"XDG_STATE_HOME": str(tmp_path / "state"), "COLUMNS": "120"}
        return subprocess.run(
            [*MAIN, *arguments],
            cwd=root,
            env={**os.environ, **state, **variables},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    return run


def test_dry_run_prints_all_and_writes_nothing(flatout, tmp_path):
    done = flatout("submit", "slurm", "--dry-run", "--nodes", "2", "train.py", "--epochs", "5")
    assert done.returncode == int("would be refused" in done.stderr)
    assert "#SBATCH --nodes=2" in done.stdout
    assert "flatout run --devices 1 train.py --epochs 5" in done.stdout
    assert "code: 14 bytes, 1 file" in done.stdout
    assert "would be refused" in done.stderr or "(nfs" in done.stdout
    assert sorted(os.listdir(tmp_path / "root")) == ["train.py"]
    said = json.loads(
        flatout("submit", "slurm", "--dry-run", "--json", "train.py", "--epochs", "5").stdout
    )
    assert said["id"] is None
    assert said["files"] == ["train.py"]
    assert said["artifacts"]["job.sbatch"].startswith("#!/bin/bash\n")


def test_dry_run_names_files_that_are_not_sent_and_exits_as_the_job_would(flatout, tmp_path):
    (tmp_path / "root/.gitignore").write_text("*.npy\n")
    (tmp_path / "root/train.npy").write_text("rows")
    (tmp_path / "root/train.py").write_text("rows = open('train.npy').read()\n")
    command = ("submit", "slurm", "--dry-run", "--shared", "/")
    done = flatout(*command, "train.py")
    assert done.returncode == 0, done.stderr
    assert "not sent: train.npy (train.py names it)" in done.stdout
    # The advice of the line works.
    assert "not sent" not in flatout(*command, "--input", "train.npy", "train.py").stdout
    (tmp_path / "root/train").write_text("rows")
    (tmp_path / "root/.gitignore").write_text("*.npy\ntrain\n")
    done = flatout(*command, "--input", "train", "train.py")  # another file, whose name begins so
    assert "not sent: train.npy (train.py names it)" in done.stdout


def test_what_no_node_sees_is_told_before_anything_is_sent(flatout, tmp_path):
    (tmp_path / "root/.gitignore").write_text("*.svm\n")
    (tmp_path / "root/day.svm").write_text("1 1:1\n")
    done = flatout("submit", "slurm", "--yes", "train.py", "--data=day.svm")
    assert done.returncode == 1
    assert "wrote submit/train-" in done.stdout
    assert "data: day.svm: lies on" in done.stdout
    assert "no --checkpoints FOLDER: once stopped, it starts over" in done.stdout
    assert "no node sees it; put it on a shared path, or say --shared PATH" in done.stderr
    assert "nothing was sent" in done.stderr
    assert "no job was sent from here" in flatout("jobs").stdout


def test_without_the_client_the_files_are_there_and_the_package_is_named(flatout, tmp_path):
    done = flatout("submit", "slurm", "--yes", "--shared", "/", "train.py", PATH="/nowhere")
    assert done.returncode == 1
    assert "sbatch is not installed here" in done.stderr
    assert "slurm-client" in done.stderr
    (folder,) = (tmp_path / "root/submit").iterdir()
    assert sorted(os.listdir(folder)) == ["code.tar.gz", "job.json", "job.sbatch"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("slurm", "no.py"), "no such script"),
        (("slurm", "--time", "soon", "train.py"), "expected a time"),
        (("slurm", "--option", "nodes=3", "train.py"), "written by Flatout itself"),
        (("slurm", "--option", "a b=3", "train.py"), "expected an option of sbatch"),
        (("slurm", "--name", "A", "train.py"), "RFC 1035"),
        (("ssh", "train.py"), "no hosts"),
        (("ssh", "--option", "hosts=a,b", "train.py"), "--nodes 1, but 2 hosts are listed"),
        (("ssh", "--option", "hosts=-oProxyCommand=id", "train.py"), "expected a host"),
        (("ssh", "--option", "host=a", "train.py"), "expected --option of"),
        (("mpi", "--option", "hosts=a", "--option", "kind=x", "train.py"), "openmpi or mpich"),
        (("mpi", "--option", "hosts=a", "--seeds", "1,2", "train.py", "{seed}"), "has a queue"),
    ],
)
def test_bad_input_is_an_error_for_people(flatout, tmp_path, arguments, said):
    done = flatout("submit", *arguments)
    assert done.returncode == 1, done.stdout
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "root/submit").exists()


def test_a_job_that_was_not_sent_from_here(flatout):
    for command in ("logs", "cancel", "jobs"):
        done = flatout(command, "4711")
        assert done.returncode == 1
        assert "no job '4711' was sent from here" in done.stderr
