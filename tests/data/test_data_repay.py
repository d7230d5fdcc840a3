"""When processes take the place of threads, and when threads come back."""

from itertools import count

import pytest
import torch
from data_made_up import MadeUp, same
from test_data_process_pool import slow
from torch import nn

import flatout
from flatout.data.pipeline import Pipeline
from flatout.data.workers.process_pool import ProcessPool, Repay


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def after_an_epoch(seconds, batches, epochs):
    clock = Clock()
    found = Repay(clock)
    found.epochs = epochs
    found.begin()
    clock.now += seconds
    found.threads_made(batches)
    return found, clock


def test_processes_begin_only_where_they_can_repay_their_start():
    short, _ = after_an_epoch(0.3, 79, 5)
    assert not any(short.may_pay(epoch, 79, 0.9, 2) for epoch in range(5))
    long, _ = after_an_epoch(10, 100, 20)
    assert long.may_pay(0, 100, 0.9, 2)
    assert not long.may_pay(0, 100, 0.01, 2)  # nothing to gain
    assert not long.may_pay(19, 100, 0.9, 2)  # the last epoch
    assert not long.may_pay(99, 100, 0.9, 2)  # a fit that went on
    unknown, _ = after_an_epoch(10, 100, None)
    assert not unknown.may_pay(0, 100, 0.9, 2)
    assert unknown.may_pay(9, 100, 0.9, 2)


@pytest.mark.parametrize(("process_s", "loses"), [(0.05, False), (0.099, True), (0.2, True)])
def test_processes_are_judged_by_what_batches_took(process_s, loses):
    found, clock = after_an_epoch(10, 100, 20)
    found.begin()
    judged = []
    for _ in range(60):
        clock.now += process_s
        found.process_made()
        judged.append(found.loses())
    assert any(judged) is loses
    assert not any(judged[:31])


def pipeline(rows=400):
    return Pipeline(MadeUp(rows)).shuffle(seed=1).map(slow).batch(8)


@pytest.mark.slow
def test_processes_that_are_slower_are_taken_back_within_an_epoch():
    made = pipeline()
    wanted = list(made.batches(0))
    program = made._program
    program.pool = pool = ProcessPool(program.maker, 2)
    program.repay = Repay(count().__next__)  # each batch takes a second, and threads took nothing
    found = made.batches(0)
    first = [next(found) for _ in range(10)]
    assert len(pool.pids) == 2
    assert all(map(same, [*first, *found], wanted))
    assert program.pool is None
    assert pool.pids == []
    assert any(note.startswith("threads again: 0 ms a batch") for note in made.notes())


@pytest.mark.slow
def test_a_short_run_starts_no_processes():
    def run(epochs, start_s=8.0):
        made = pipeline(80)
        made._program.repay = Repay(start_s=start_s)
        made.expect_epochs(epochs)
        for epoch in range(epochs):
            # As if another thread had been tried and had made nothing faster.
            tuner = made._program.tuner
            tuner.in_vain = tuner.judged = True
            tuner.waited = 1.0
            list(made.batches(epoch))
        return made._program.pool

    assert run(3) is None
    # Where starting costs nothing there are processes, but not for the last epoch alone.
    assert run(1, start_s=0.0) is None
    pool = run(2, start_s=0.0)
    assert pool is not None
    pool.close()


@pytest.mark.slow
def test_a_run_says_how_many_epochs_it_has():
    made = pipeline(32).map(lambda x, y: (torch.as_tensor(x), torch.zeros(len(x), 1)))
    trainer = flatout.Trainer(nn.Linear(3, 1), loss="mse", say=lambda line: None)
    trainer.fit(made, epochs=3, progress=False)
    assert made._program.repay.epochs == 3
    loop = flatout.Loop(say=lambda line: None)
    assert next(loop.epochs(7)) == 0
    assert loop.progress.planned_epochs == 7
