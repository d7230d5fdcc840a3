"""A Dataset whose batches are made in the fastest way are always the same batches."""

import os
import random
import signal
import sqlite3

import numpy as np
import pytest
import torch
from test_data_dataset import Broken, Squares, same
from torch.utils.data import Dataset

from flatout.data.execution.batch_sampler import batches_of
from flatout.data.randomness import random_state, same_state
from flatout.data.sources.datasets.dataset_source import DatasetSource
from flatout.data.sources.datasets.tuned_dataset import TunedDatasetSource
from flatout.errors import DataError

USE_S, MAKE_S = 0.02, 0.01
SAMPLES, BATCH = 800, 8


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


class Slow(Squares):
    """Each sample takes a time that only the process sees which makes it."""

    clock = Clock()

    def __init__(self, samples=SAMPLES):
        super().__init__(samples)

    def __getitem__(self, index):
        self.clock.now += MAKE_S
        return torch.tensor([float(index)]), int(index) * int(index)


def plan(samples=SAMPLES):
    return batches_of(samples, batch_size=BATCH, shuffle=True, seed=3, drop_last=False)


def tuned(dataset, workers="auto", **options):
    source = TunedDatasetSource(
        dataset, plan(len(dataset)), workers=workers, clock=dataset.clock, **options
    )
    source.expect_epochs(100)
    return source


def used(source, epoch, batches=None):
    """An epoch's batches, each with who made it; a step takes its time."""
    made = []
    for batch in source.batches(epoch):
        source.dataset.clock.now += USE_S
        made.append((source.tuner.workers, batch))
        if len(made) == batches:
            break
    return made


def check_same(made, dataset, epoch):
    expected = DatasetSource(dataset, plan(len(dataset))).batches(epoch)
    assert all(same(batch, other) for (_, batch), other in zip(made, expected, strict=True))


@pytest.mark.slow
def test_worker_processes_make_the_same_batches_in_the_middle_of_an_epoch():
    source = tuned(Slow())
    for epoch in range(3):
        made = used(source, epoch)
        check_same(made, Slow(), epoch)
        assert len(made) == 100
    assert source.tuner.settled in (2, 4)
    assert {"thread", 0, source.tuner.settled} <= {
        who for e in (0,) for who, _ in used(tuned(Slow()), e)
    }
    (note,) = source.tuner.notes[:1]
    assert "same batches" in note
    assert source.describe().endswith(f"read by {source.tuner.settled} worker(s)")


def test_a_thread_makes_the_same_batches():
    source = tuned(Slow(), workers="thread")
    for epoch in range(2):
        made = used(source, epoch)
        assert {who for who, _ in made} == {"thread"}
        check_same(made, Slow(), epoch)
    check_same(used(source, 1), Slow(), 1)


class Drawing(Slow):
    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return torch.cat([x, torch.rand(1), torch.tensor([random.random(), np.random.rand()])]), y


@pytest.mark.slow
def test_samples_that_draw_are_made_by_processes_and_never_by_a_thread():
    source = tuned(Drawing())
    state = random_state()
    made = [used(source, epoch) for epoch in range(2)]
    assert same_state(state, random_state())
    for epoch in range(2):
        check_same(made[epoch], Drawing(), epoch)
    assert "thread" not in {who for epoch in made for who, _ in epoch}
    assert source.tuner.settled in (2, 4)
    asked = tuned(Drawing(), workers="thread")
    check_same(used(asked, 0), Drawing(), 0)
    assert "random numbers" in asked.tuner.notes[0]


class OwnGenerator(Slow):
    def __init__(self):
        super().__init__()
        self.rng = np.random.default_rng(0)

    def __getitem__(self, index):
        super().__getitem__(index)
        return torch.tensor(self.rng.random()), index


class Tracked(Slow):
    """What it gives depends on the model that it helps to train."""

    def __init__(self):
        super().__init__()
        self.model = torch.nn.Linear(1, 1)


class OfDatabase(Slow):
    def __init__(self):
        super().__init__()
        self.rows = sqlite3.connect(":memory:")


@pytest.mark.parametrize(
    ("kind", "words"),
    [(OwnGenerator, "its own Generator"), (Tracked, "Linear"), (OfDatabase, "Connection")],
)
def test_what_depends_on_when_it_is_asked_is_read_as_written(kind, words):
    source, plain = tuned(kind()), kind()
    expected = DatasetSource(plain, plan())
    for epoch in range(2):
        made = used(source, epoch)
        assert {who for who, _ in made} == {0}
        for (_, batch), other in zip(made, expected.batches(epoch), strict=True):
            assert same(batch, other)
    assert any(words in trial for trial in source.tuner.trials)


class OfFile(Slow):
    """Reads a file that forked processes would share, position and all."""

    def __init__(self, path):
        super().__init__()
        self.file = path.open("rb")

    def __getitem__(self, index):
        x, _ = super().__getitem__(index)
        self.file.seek(8 * index)
        return x, int.from_bytes(self.file.read(8), "little")


def test_an_open_file_is_not_shared_with_processes(tmp_path):
    path = tmp_path / "numbers"
    path.write_bytes(b"".join((i * i).to_bytes(8, "little") for i in range(SAMPLES)))
    source = tuned(OfFile(path))
    for epoch in range(2):
        made = used(source, epoch)
        check_same(made, Slow(), epoch)
        assert {who for who, _ in made} <= {0, "thread"}
    assert any("BufferedReader" in trial for trial in source.tuner.trials)


class Dying(Slow):
    def __init__(self):
        super().__init__()
        self.parent = os.getpid()

    def __getitem__(self, index):
        if os.getpid() != self.parent:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


def test_workers_that_die_lose_no_batch():
    source = tuned(Dying())
    for epoch in range(2):
        check_same(used(source, epoch), Slow(), epoch)
    assert source.tuner.settled in (0, "thread")
    assert any("they fail" in trial for trial in source.tuner.trials)


class Elsewhere(Slow):
    """Gives something else in another process."""

    def __init__(self):
        super().__init__()
        self.parent = os.getpid()

    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return x, y + (os.getpid() != self.parent)


def test_workers_that_make_other_batches_are_not_used():
    source = tuned(Elsewhere())
    for epoch in range(2):
        check_same(used(source, epoch), Slow(), epoch)
    assert any("made other values" in trial for trial in source.tuner.trials)


@pytest.mark.parametrize("workers", ["auto", "thread"])
def test_a_sample_that_cannot_be_read_is_named(workers):
    dataset = Broken(40)
    dataset.clock = Clock()
    source = tuned(dataset, workers)
    with pytest.raises(DataError, match="sample 7 cannot be read: OSError: image file is trunc"):
        used(source, 0)


def test_a_short_run_tries_nothing():
    short = tuned(Slow(160))
    short.expect_epochs(1)
    assert {who for who, _ in used(short, 0)} == {0}
    assert short.tuner.trials == []


class Arrays(Dataset):
    """Takes an array of numbers as well as one, which takes no longer."""

    clock, asked = Clock(), []  # not of the object, which does not change

    def __init__(self, samples=64):
        self.asked.clear()
        self.x = torch.randn(samples, 3)
        self.x[5] = float("nan")
        self.y = np.arange(samples)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        self.asked.append(np.size(index))
        self.clock.now += MAKE_S
        return self.x[index], self.y[index]


def test_whole_batches_are_made_where_all_samples_are_the_same():
    dataset = Arrays()
    source = tuned(dataset)
    used(source, 0)
    assert dataset.asked == 8 * ([1] * 8 + [8])  # both ways, to be compared
    dataset.asked.clear()
    made = used(source, 1)
    assert dataset.asked == [8] * 8
    expected = DatasetSource(dataset, plan(64)).batches(1)
    for (_, batch), other in zip(made, expected, strict=True):
        assert torch.equal(batch.targets, other.targets)
        assert torch.equal(batch.inputs.view(torch.int32), other.inputs.view(torch.int32))
    assert "all 64 samples were compared bit for bit" in source.tuner.notes[0]


class Doubled(Arrays):
    """A batch of even samples is another one when it is asked for at once."""

    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return x, y + (np.size(index) > 1 and 11 in np.atleast_1d(index))


class Flipped(Arrays):
    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return x * torch.rand(()).sign(), y


class OneByOne(Arrays):
    def __getitem__(self, index):
        return super().__getitem__(int(index))


@pytest.mark.parametrize(
    ("kind", "words"),
    [(Doubled, "are others"), (Flipped, "random numbers"), (OneByOne, "raises TypeError")],
)
def test_whole_batches_are_not_made_where_they_differ(kind, words):
    source = tuned(kind())
    for epoch in range(3):
        used(source, epoch)
    assert any(words in trial for trial in source.tuner.trials)
    source.dataset.asked.clear()
    used(source, 3)
    assert set(source.dataset.asked) == {1}


def test_a_dataset_that_changes_is_compared_again():
    dataset = Arrays()
    source = tuned(dataset)
    used(source, 0)
    dataset.y = dataset.y + 1
    dataset.asked.clear()
    used(source, 1)
    assert dataset.asked == 8 * ([1] * 8 + [8])
    dataset.y = dataset.y + 1
    dataset.asked.clear()
    used(source, 2)
    assert dataset.asked == [1] * 64
    assert any("another one in each epoch" in trial for trial in source.tuner.trials)


def test_peeking_asks_nothing_else_and_draws_nothing():
    source = tuned(Drawing())
    state = random_state()
    assert same(source.peek(1)[0], next(DatasetSource(Drawing(), plan()).batches(0)))
    assert same_state(state, random_state())
    assert source.tuner.left == 0
