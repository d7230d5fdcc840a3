"""Who is found to make batches, by the time that steps take; the clock is made up."""

import pytest

from flatout.data.workers.worker_tuner import WorkerTuner


class Job:
    """Steps that take so long with so many workers, and wait for so much of it."""

    def __init__(self, takes, *, most=4, fixed=None):
        self.takes = takes
        self.now = 0.0
        self.tuner = WorkerTuner(most, lambda: self.now, fixed=fixed)
        self.by = []

    def run(self, batches, left):
        self.tuner.left = left
        self.tuner.begin()
        for _ in range(batches):
            workers = self.tuner.workers
            self.by.append(workers)
            step_s, waited_s = self.takes[workers]
            self.now += step_s
            self.tuner.used(waited_s)
        return self.tuner


PLAIN = (0.1, 0.08)


@pytest.mark.parametrize(
    ("takes", "settled"),
    [
        ({0: (0.1, 0.005)}, 0),  # nothing is waited for: nothing is tried
        ({0: PLAIN, "thread": (0.05, 0.001)}, "thread"),
        ({0: PLAIN, "thread": (0.11, 0.09), 4: (0.021, 0.001)}, 4),
        ({0: PLAIN, "thread": (0.09, 0.07), 4: (0.021, 0.001)}, 4),
        ({0: PLAIN, "thread": (0.096, 0.07), 4: (0.096, 0.07)}, 0),  # within the noise
        ({0: PLAIN, "thread": (0.3, 0.28), 4: (0.3, 0.28)}, 0),
    ],
)
def test_what_is_faster_is_kept(takes, settled):
    tuner = Job(takes).run(1_000, 100_000)
    assert (tuner.settled, tuner.workers) == (settled, settled)
    assert (tuner.kept is None) == (settled == 0)
    assert bool(tuner.notes) == (settled != 0)


def test_more_workers_are_tried_while_batches_are_waited_for():
    takes = {0: (0.1, 0.06), "thread": (0.2, 0.1), 2: (0.06, 0.02), 4: (0.041, 0.0), 8: (1, 1)}
    tuner = Job(takes, most=8).run(1_000, 100_000)
    assert tuner.settled == 4
    assert [trial.rpartition(", ")[2] for trial in tuner.trials] == ["put back", "kept", "kept"]
    assert tuner.kept.ratio == pytest.approx(0.06 / 0.041)
    assert "1.46x faster, 41 ms for 60 ms" in tuner.notes[-1]


def test_a_thread_that_can_save_nothing_is_not_tried():
    takes = {0: (0.1, 0.097), "thread": (0.1, 0.097), 4: (0.021, 0.019)}
    job = Job(takes)
    assert job.run(1_000, 100_000).settled == 4
    assert "thread" not in job.by


def test_what_is_clearly_faster_is_soon_kept():
    job = Job({0: (0.1, 0.097), 4: (0.021, 0.019)})
    job.run(200, 100_000)
    first = job.by.index(4)
    assert job.by.count(0) < first + 8  # the window behind the trial is a short one
    clear = job.by.count(0)
    job = Job({0: (0.1, 0.097), 4: (0.09, 0.08)})
    job.run(200, 100_000)
    assert job.by.count(0) > clear


def test_a_trial_is_repaid_within_the_run():
    takes = {0: PLAIN, "thread": (0.1, 0.08), 4: (0.021, 0.001)}
    job = Job(takes)
    job.run(50, 50)
    assert set(job.by) == {0}  # too few batches are left for any trial
    quick = Job({w: (s / 100, t / 100) for w, (s, t) in takes.items()})
    quick.run(5_000, 5_000)  # five seconds
    assert 4 not in quick.by


def test_a_candidate_that_is_far_slower_is_given_up_early():
    job = Job({0: (0.01, 0.008), "thread": (1.0, 0.9), 4: (1.0, 0.9)})
    tuner = job.run(20_000, 100_000)
    assert tuner.settled == 0
    assert job.by.count("thread") <= 3
    assert job.by.count(4) <= 3


def test_what_has_become_slower_is_taken_back():
    takes = {0: PLAIN, "thread": (0.3, 0.2), 4: (0.03, 0.001)}
    job = Job(takes)
    assert job.run(1_000, 100_000).settled == 4
    takes[4] = (0.2, 0.001)  # another process has come
    tuner = job.run(1_000, 100_000)
    assert tuner.settled == 0
    assert tuner.kept is None
    assert "again: that is 2.00x faster now" in tuner.notes[-1]
    takes[4] = (0.001, 0.0)
    assert job.run(1_000, 100_000).settled == 0


def test_what_is_slower_for_all_is_doubted_less_and_less():
    takes = {0: PLAIN, "thread": (0.3, 0.2), 4: (0.03, 0.001)}
    job = Job(takes)
    assert job.run(1_000, 100_000).settled == 4
    takes.update({0: (0.5, 0.4), 4: (0.2, 0.001)})  # the whole machine has become busy
    job.by.clear()
    assert job.run(4_000, 100_000).settled == 4
    assert 0 < job.by.count(0) < 200


def test_one_busy_moment_keeps_nothing():
    takes = {0: (0.2, 0.16), "thread": (0.11, 0.09)}
    job = Job(takes, most=0)
    while job.tuner.workers == 0:
        job.run(1, 10_000)
    while job.tuner.workers == "thread":
        job.run(1, 10_000)
    takes[0] = PLAIN  # the machine was busy while this was measured the first time
    assert job.run(1_000, 10_000).settled == 0


def test_what_fails_is_not_tried_again():
    job = Job({0: PLAIN, "thread": (0.05, 0.04), 4: (0.01, 0.0)})
    while job.tuner.workers == 0:
        job.run(1, 100_000)
    job.tuner.refuse("thread", "it fails")
    assert job.tuner.workers == 0
    tuner = job.run(1_000, 100_000)
    assert tuner.settled == 4
    tuner.refuse(4, "worker 2 was killed")
    assert (tuner.settled, tuner.workers, tuner.kept) == (0, 0, None)
    assert "worker 2 was killed" in tuner.notes[-1]
    assert set(job.by[-1:]) | {job.run(500, 100_000).workers} == {4, 0}


def test_what_is_asked_for_stays():
    job = Job({"thread": (0.5, 0.4), 0: (0.1, 0.0)}, fixed="thread")
    assert job.run(500, 100_000).workers == "thread"
    job.tuner.refuse("thread", "it draws")
    assert job.run(500, 100_000).workers == 0
