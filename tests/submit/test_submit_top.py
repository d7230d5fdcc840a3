"""What the nodes of a job tell of its ranks, put together."""

import io
import time

import pytest
from rich.console import Console

from flatout.errors import SubmitError
from flatout.report import together
from flatout.submit import Entry, Ledger, TopOfJob, top_of
from flatout.submit.target import JobState, State, target_of

NOW = 1_795_686_400.0


def told(host, ranks, late_s=0.0, gpus=()):
    """What `flatout top --json` prints on a node whose clock is late."""
    now = NOW - late_s
    jobs = [
        {"ranks": [{
            "pid": 10 + rank, "rank": rank, "world_size": 2, "job": f"127.0.0.1:{host}",
            "run": None, "command": ["train.py"], "started": now - 60, "updated": now - 1,
            "steps": 40, "lanes_ms": {"input": 1.0, "forward": 2.0}, "throughput": 10.0,
            "watched_s": 0.0, "starved_s": 0.0, "submitted": "key", "is_starved": False,
            "cpu_percent": 50.0, "rss_bytes": 1000,
        } for rank in ranks]}
    ]  # fmt: skip
    gpus = [{"index": 0, "name": one, "busy_percent": 5, "memory_used": 1, "memory_total": 2,
             "pids": []} for one in gpus]  # fmt: skip
    return {"host": host, "time": now, "jobs": jobs if ranks else [], "gpus": gpus}


def test_the_ranks_of_all_nodes_are_one_job_whatever_their_clocks_say(monkeypatch):
    monkeypatch.setattr(time, "time", lambda: NOW)
    sample = together([told("b", [1], gpus=["L4"]), told("a", [0], late_s=3600, gpus=["L4"])])
    (job,) = sample.jobs
    assert [now.rank.rank for now in job.ranks] == [0, 1]
    assert [NOW - now.rank.started for now in job.ranks] == [60, 60]
    assert job.notes() == []  # neither has been silent for an hour
    console = Console(file=(out := io.StringIO()), width=100)
    console.print(sample)
    assert "GPU 0 L4 of a" in out.getvalue()
    # Two nodes of one machine see the ranks of both.
    assert len(together([told("a", [0, 1]), told("a", [0, 1])]).jobs[0].ranks) == 2
    assert together([told("a", []), told("b", [])]).jobs == []


@pytest.mark.parametrize(
    ("state", "said"),
    [(State.queued, "it is queued"), (State.failed, "it is failed"), (State.running, "no lanes")],
)
def test_a_job_that_shows_nothing(state, said, monkeypatch, tmp_path):
    to = target_of("slurm")
    monkeypatch.setattr(type(to), "state", lambda self, id, folder: JobState(state))
    when = "2026-11-26T12:00:00+00:00"
    Ledger().write(Entry("key", "slurm", "a", str(tmp_path), when, "sent", "4711"))
    assert top_of("4712") is None
    assert top_of("key") is None  # as the nodes of the job ask
    if state is not State.running:
        with pytest.raises(SubmitError, match=said):
            top_of("4711")
        return
    found = top_of("4711")
    assert isinstance(found, TopOfJob)
    with pytest.raises(SubmitError, match="none of its ranks shows its lanes"):
        found.check(together([told("a", [])]))
    monkeypatch.setattr(type(to), "top", lambda self, id, folder, key: ["bash: flatout: no"])
    with pytest.raises(SubmitError, match="expected what flatout top --json prints"):
        found.sample()
