"""What is shown of a job that failed, and of jobs at a glance."""

import subprocess
from dataclasses import replace

import pytest

from flatout.submit import Entry, JobState, State, detached, slurm
from flatout.submit.watch import JobStatus, _of_the_first

LOG = """\
[host1] epoch 1/2
[host2] [rank1]: flatout: rank 1 of 2, node 1 of 2 has failed:
[host2] [rank1]: Traceback (most recent call last):
[host1] [rank0]: flatout: rank 0 of 2 has failed as well: ValueError: lost
[host2] [rank1]:   File "train.py", line 12, in on_step
[host2] [rank1]: ValueError: no good
[host2] flatout: rank 1 (process 1) has ended with exit code 1; all ranks have ended
""".splitlines()


def test_the_traceback_of_the_rank_that_failed_first():
    assert _of_the_first(LOG) == [LOG[1], LOG[2], LOG[4], LOG[5]]
    assert _of_the_first(["a", "Traceback (most recent call last):", "ValueError: x"])[-1] == (
        "ValueError: x"
    )
    assert _of_the_first([str(n) for n in range(100)]) == [str(n) for n in range(85, 100)]
    deep = [LOG[1], *(f"[host2] [rank1]: {n}" for n in range(100))]
    assert _of_the_first(deep)[:2] == [LOG[1], "  …"]
    assert len(_of_the_first(deep)) == 17


def test_a_row_of_the_table():
    entry = Entry("k", "slurm", "train", "/", "2026-11-26T12:00:00+00:00", "sent", "4711")
    state = JobState(State.failed, "FAILED", exit_code=1, nodes=("n1", "n2"), since_s=61, starts=2)
    assert JobStatus(entry, state).row() == (
        *("4711", "slurm", "failed (1)", "1m01s", "train · n1, n2 · FAILED · start 2"),
    )
    running = JobState(State.running, "RUNNING", since_s=5.0, eta="12min")
    assert JobStatus(entry, running).row()[-1] == "train · RUNNING · ends in 12min"
    assert JobStatus(entry, None, "SLURM does not answer").row()[2:] == (
        *("?", "", "train · SLURM does not answer"),
    )
    # Where the id has the name, it is not said twice.
    assert (
        JobStatus(replace(entry, id="team/train"), running).row()[-1] == "RUNNING · ends in 12min"
    )


def test_what_a_job_costs():
    when = "2026-11-26T12:00:00+00:00"
    entry = Entry("k", "slurm", "a", "/", when, "sent", "1", nodes=2, price=0.68, currency="USD")
    running = JobState(State.running, since_s=1800.0, left_s=3600.0)
    told = JobStatus(entry, running)
    assert told.row()[-1] == "a · cost 0.68 USD so far, about 1.36 USD to come"
    cost = told.as_dict()["cost"]
    assert cost == {"currency": "USD", "so_far": pytest.approx(0.68), "to_come": 1.36}
    # Earlier starts cost too; no one knows how long without an ETA.
    again = replace(running, paid_s=5400.0, left_s=None)
    assert JobStatus(entry, again).row()[-1] == "a · cost 2.04 USD so far"
    ended = JobState(State.succeeded, exit_code=0, since_s=3600.0)
    assert JobStatus(entry, ended).row()[-1] == "a · cost 1.36 USD"
    assert JobStatus(replace(entry, price=None), running).cost is None
    assert JobStatus(entry, JobState(State.running)).cost is None  # the cluster tells no time


def test_slurm_pays_for_earlier_starts_too(tmp_path):
    told = {"JobState": "RUNNING", "Restarts": "2", "RunTime": "00:01:00"}
    (tmp_path / "ran.0").write_text("300\n")
    (tmp_path / "ran.1").write_text("60\n")
    (tmp_path / "ran.2").write_text("30\n")  # of the present start, whose time SLURM knows
    found = slurm._state({**told, "Comment": "flatout:k:12min"}, tmp_path)
    assert (found.since_s, found.paid_s, found.left_s, found.eta) == (60.0, 420.0, 720.0, "12min")
    one, two = (slurm._state({**told, "ArrayTaskId": task}, tmp_path) for task in "12")
    assert slurm._together([one, two]).paid_s == 120.0


def test_what_a_host_tells_of_its_node(tmp_path):
    def ask():
        command = ["sh", "-c", detached.ask("node-0")]
        said = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
        return detached.state_of(said.stdout)

    def write(kind, text=""):
        (tmp_path / f"node-0.{kind}").write_text(text)

    assert ask().words == detached.ABSENT
    write("begun")
    write("lock")
    assert ask().state is State.lost
    write("remaining", '{"progress": 0.5, "remaining_s": 840, "epoch": 2, "epochs": 5}\n')
    with subprocess.Popen(["flock", "node-0.lock", "cat"], cwd=tmp_path, stdin=-1) as holding:
        while ask().state is State.lost:
            pass
        found = ask()
        assert (found.state, found.left_s, found.eta) == (State.running, 840, "14:00")
        holding.stdin.close()
    write("exit_code")
    assert ask().state is State.stopping
    write("exit_code", "7\n")
    found = ask()
    assert (found.state, found.exit_code) == (State.failed, 7)
    assert 0 <= found.since_s < 60
    # A host that still runs beside it says so; one of a job that has ended is named.
    both = detached.together({"host1": found, "host2": JobState(State.running, since_s=9.0)})
    assert (both.state, both.words) == (State.running, "host1 has failed with exit code 7")
    both = detached.together({"host1": found, "host2": JobState(State.succeeded, exit_code=0)})
    assert (both.state, both.words, both.exit_code) == (State.failed, "host1: exit code 7", 7)
    write("canceled")
    assert ask().state is State.canceled
