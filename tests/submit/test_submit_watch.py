"""What is shown of a job that failed, and of jobs at a glance."""

from flatout.submit import Entry, JobState, State
from flatout.submit.watch import Seen, _of_the_first

LOG = """\
[host1] epoch 1/2
[host2] [rank1]: flatout: rank 1 of 2, node 1 of 2, started by torchrun has failed:
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
    assert Seen(entry, state).row() == (
        *("4711", "slurm", "failed (1)", "1m01s", "n1,n2", "train", "FAILED · start 2"),
    )
    running = JobState(State.running, "RUNNING", since_s=5.0, eta="12min")
    assert Seen(entry, running).row()[-1] == "RUNNING · ends in 12min"
    assert Seen(entry, None, "SLURM does not answer").row()[2] == "?"
