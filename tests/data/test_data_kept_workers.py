"""Worker processes of an iterable Dataset that serve several epochs."""

import os
import random
import threading

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from flatout.data import dataset
from flatout.data.randomness import batch_seed
from flatout.errors import DataError

SEED, SAMPLES, WORKERS = 3, 12, 2


class Drawn(IterableDataset):
    """Samples of a number, its epoch, its reading, random numbers of each kind, and a process."""

    epoch, readings, level = 0, 0, 0.0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        self.readings += 1
        worker = get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        seed = 0 if worker is None else worker.seed % 1000 + (worker.dataset is self)
        for number in range(first, SAMPLES, step):
            draws = [torch.rand(()).item(), random.random(), np.random.rand()]
            here = [number, self.epoch, self.readings, self.level, seed]
            yield torch.tensor([*here, *draws, os.getpid()], dtype=torch.float64), number


def read(source, epoch):
    rows = torch.cat([batch.inputs for batch in source.batches(epoch)])
    return rows[:, :-1], set(rows[:, -1].tolist())


def read_with_new_workers(samples, epoch):
    generator = torch.Generator().manual_seed(batch_seed(SEED, epoch, 0))
    samples.set_epoch(epoch)
    loader = DataLoader(samples, 4, num_workers=WORKERS, generator=generator)
    return torch.cat([inputs for inputs, _ in loader])[:, :-1]


def source_of(samples):
    return dataset(samples, batch_size=4, seed=SEED, workers=WORKERS)


def test_kept_workers_give_the_samples_of_new_workers():
    samples = Drawn()
    source, processes = source_of(samples), []
    for epoch in (0, 1, 1, 4):
        samples.level = 0.5 * epoch  # as a callback may change it between epochs
        rows, workers = read(source, epoch)
        assert torch.equal(rows, read_with_new_workers(samples, epoch))
        processes.append(workers)
    assert len(processes[0]) == WORKERS
    assert processes == [processes[0]] * 4


def test_an_epoch_that_was_left_early_does_not_reach_the_next():
    samples = Drawn()
    source = source_of(samples)
    passing = source.batches(0)
    next(passing)
    passing.close()
    rows, _ = read(source, 1)
    assert torch.equal(rows, read_with_new_workers(samples, 1))


class Locked(Drawn):
    def __init__(self):
        self.lock = threading.Lock()


class OwnCopy(Drawn):
    def __getstate__(self):
        return {}


class Counting(Drawn):
    def __iter__(self):
        global SEED
        SEED += 0
        yield from super().__iter__()


class Common(Drawn):
    def __init__(self):
        self.seen = torch.zeros(1).share_memory_()


@pytest.mark.parametrize("kind", [Locked, OwnCopy, Counting, Common])
def test_a_dataset_whose_copies_may_differ_gets_new_workers(kind):
    source = source_of(kind())
    (rows, before), (again, after) = read(source, 2), read(source, 2)
    assert torch.equal(rows, again)
    assert not before & after


class Failing(Drawn):
    def __iter__(self):
        if self.level:
            raise ValueError("the shard is away")
        yield from super().__iter__()


def test_workers_that_failed_are_replaced():
    samples = Failing()
    source = source_of(samples)
    _, before = read(source, 0)
    samples.level = 1.0
    with pytest.raises((DataError, ValueError), match="the shard is away"):
        read(source, 1)
    samples.level = 0.0
    rows, after = read(source, 1)
    assert torch.equal(rows, read_with_new_workers(samples, 1))
    assert not before & after


def test_a_dataset_that_grows_is_read_as_it_is():
    samples = Drawn()
    source = source_of(samples)
    read(source, 0)
    samples.names = ["shard"] * 5000
    rows, _ = read(source, 1)
    assert torch.equal(rows, read_with_new_workers(samples, 1))
    samples.names = list(range(2**20))  # larger than what is kept
    rows, _ = read(source, 2)
    assert torch.equal(rows, read_with_new_workers(samples, 2))
