"""Iterators that a thread reads ahead, where that is faster and gives the same."""

import random
import sqlite3
import threading
from itertools import islice

import pytest
import torch
from test_data_dataset import Squares, same
from torch.utils.data import DataLoader

from flatout.data.randomness import random_state, same_state
from flatout.data.sources.datasets.dataset import dataset, from_loader
from flatout.data.sources.datasets.iterable import IterableSource, iterable
from flatout.data.workers.read_ahead import EpochReader, read_ahead
from flatout.errors import DataError

STEPS = 20


def test_items_come_in_order_and_errors_in_their_place():
    assert list(read_ahead(iter(range(100)))) == list(range(100))

    def failing():
        yield 1
        raise OSError("gone")

    made = read_ahead(failing())
    assert next(made) == 1
    with pytest.raises(OSError, match="gone"):
        next(made)
    with pytest.raises(StopIteration):
        next(made)


def test_no_more_is_read_than_asked_for_and_two():
    items = iter(range(100))
    made = read_ahead(items)
    assert list(islice(made, 5)) == [0, 1, 2, 3, 4]
    made.close()
    assert 5 <= next(items) <= 8
    assert not [one for one in threading.enumerate() if one.name.startswith("flatout-input")]


class Clock:
    """The time of steps: a thread that reads saves what `saves` says."""

    def __init__(self, saves=0.008):
        self.now, self.saves = 0.0, saves

    def __call__(self):
        return self.now

    def making(self):
        """The batch is made in the thread that waits for it, or beside it."""
        is_ahead = threading.current_thread() is not threading.main_thread()
        self.now += 0.0 if is_ahead else 0.008

    def using(self, is_ahead):
        self.now += 0.002 + (0.008 - self.saves if is_ahead else 0.0)


def epochs(source, clock, total=4):
    """Every epoch's batches, and whether a thread read them."""
    found = []
    source.expect_epochs(total)
    for epoch in range(total):
        batches, is_ahead = [], False
        for batch in source.batches(epoch):
            is_ahead = source.reader.settled == "thread"
            clock.using(is_ahead)
            batches.append(batch)
        found.append((is_ahead, batches))
    return found


def source_of(make, clock, workers="auto", **options):
    source = iterable(make, workers=workers, **options)
    source.reader.clock = clock
    return source


def plain(clock, steps=STEPS):
    def make():
        for step in range(steps):
            clock.making()
            yield torch.full((2, 1), float(step))

    return make


def test_a_thread_reads_from_the_second_epoch_on_where_that_is_faster():
    clock = Clock()
    found = epochs(source_of(plain(clock), clock), clock)
    assert [is_ahead for is_ahead, _ in found] == [False, True, True, True]
    for _, batches in found:
        assert [batch.inputs[0].item() for batch in batches] == list(range(STEPS))


def test_a_thread_that_gains_nothing_is_put_back():
    clock = Clock(saves=0.0)
    source = source_of(plain(clock), clock)
    found = epochs(source, clock)
    assert [is_ahead for is_ahead, _ in found] == [False, True, False, False]
    assert source.report.kept is None
    assert "put back" in source.report.trials[0]


def test_no_thread_where_nothing_is_waited_for_or_asked():
    clock = Clock()
    quick = source_of(lambda: iter([torch.ones(1, 1)] * STEPS), clock)
    assert not any(is_ahead for is_ahead, _ in epochs(quick, clock))
    assert not any(is_ahead for is_ahead, _ in epochs(source_of(plain(clock), clock, 0), clock))
    once = source_of(plain(clock), clock)
    assert not any(is_ahead for is_ahead, _ in epochs(once, clock, total=1))
    asked = source_of(plain(clock), clock, "thread")
    assert all(is_ahead for is_ahead, _ in epochs(asked, clock))


def test_a_generator_that_draws_random_numbers_is_read_as_written():
    clock = Clock()

    def make():
        for _ in range(STEPS):
            clock.making()
            yield torch.rand(2, 1) + random.random()

    source = source_of(make, clock)
    assert not any(is_ahead for is_ahead, _ in epochs(source, clock))
    assert source.report.trials == ["a thread: it draws random numbers"]


@pytest.mark.parametrize("workers", ["auto", "thread"])
def test_a_generator_that_works_with_the_model_is_read_as_written(workers):
    model, clock = torch.nn.Linear(1, 1), Clock()

    def make():
        for _ in range(STEPS):
            clock.making()
            yield model(torch.ones(2, 1)).detach()

    source = source_of(make, clock, workers)
    assert not any(is_ahead for is_ahead, _ in epochs(source, clock))
    assert "Linear" in "".join(source.report.trials + source.report.notes)


def test_what_a_thread_cannot_read_is_read_again_by_the_process():
    clock, opened = Clock(), []

    class Rows:
        """Its connection, which belongs to this thread, is beyond what can be seen."""

        def __iter__(self):
            for step in range(STEPS):
                clock.making()
                (value,) = connection().execute("select ?", (step,)).fetchone()
                yield torch.full((2, 1), float(value))

    def connection():
        return opened[0]

    # The list holds it too deep in a module of another name to be found by names.
    opened.append(_Hidden(sqlite3.connect(":memory:")))
    source = source_of(Rows(), clock)
    found = epochs(source, clock)
    for _, batches in found:
        assert [batch.inputs[0].item() for batch in batches] == list(range(STEPS))
    assert not found[-1][0]
    assert "SQLite objects created in a thread" in "".join(source.report.trials)


class _Hidden:
    __slots__ = ("execute",)

    def __init__(self, connection):
        self.execute = connection.execute


def test_an_error_of_the_data_stays_one():
    clock = Clock()

    class Failing:
        passes = 0

        def __iter__(self):
            Failing.passes += 1
            for step in range(STEPS):
                clock.making()
                if Failing.passes > 1 and step == 7:
                    raise OSError("the disk is gone")
                yield torch.ones(1, 1)

    with pytest.raises(OSError, match="the disk is gone"):
        epochs(source_of(Failing(), clock), clock)


def test_a_loader_without_workers_gives_the_same_and_resumes():
    def source(workers):
        torch.manual_seed(3)
        return from_loader(DataLoader(Squares(40), batch_size=4, shuffle=True), workers)

    expected = [list(source(0).batches(0))]
    ahead = source("thread")
    torch.manual_seed(3)
    ahead = from_loader(DataLoader(Squares(40), batch_size=4, shuffle=True), "thread")
    made = []
    for step, batch in enumerate(ahead.batches(0)):
        made.append(batch)
        if step == 3:
            state = ahead.state_dict()
    assert all(map(same, made, expected[0]))
    fresh = source("thread")
    fresh.load_state_dict(state)
    assert all(map(same, list(fresh.batches(0, 4)), expected[0][4:]))


def test_who_has_workers_needs_no_thread():
    loader = DataLoader(Squares(8), batch_size=4, num_workers=1)
    assert from_loader(loader, "auto").report is None
    assert iterable([(torch.ones(1, 1), torch.ones(1))]).report is None
    assert isinstance(dataset(Squares(8)).report.settled, int)
    assert isinstance(iterable(iter([torch.ones(1, 1)])), IterableSource)


def test_a_running_generator_goes_on_in_a_thread_and_back():
    clock = Clock()
    source = source_of(plain(clock, 4 * STEPS)(), clock, steps=STEPS)
    found = epochs(source, clock)
    assert [is_ahead for is_ahead, _ in found] == [False, True, True, True]
    values = [batch.inputs[0].item() for _, batches in found for batch in batches]
    assert values == list(range(4 * STEPS))
    with pytest.raises(DataError, match="epoch 4 is empty"):
        list(source.batches(4))


def test_reading_ahead_leaves_the_generators_of_the_process_alone():
    clock = Clock()
    state = random_state()
    epochs(source_of(plain(clock), clock, "thread"), clock)
    assert same_state(state, random_state())
    assert EpochReader(0, None).settled == 0


# -- a DataLoader without workers, by processes ----------------------------------------------------


class Numbers(torch.utils.data.Dataset):
    """Samples made in pure Python, which a thread cannot make faster. They advance the clock."""

    def __init__(self, clock, rows=80):
        self.clock, self.rows = clock, rows

    def __len__(self):
        return self.rows

    def __getitem__(self, number):
        # A thread that reads ahead holds the GIL: `read_by` counts its time where training goes on.
        if threading.current_thread() is threading.main_thread():
            self.clock.now += 0.1
        return torch.full((1,), float(number)), number % 2


class Draws(Numbers):
    def __getitem__(self, number):
        x, y = super().__getitem__(number)
        return x + random.random(), y


class DrawsOwn(Numbers):
    def __init__(self, clock):
        super().__init__(clock)
        self.draw = random.Random(1)


class DiffersInWorkers(Numbers):
    def __getitem__(self, number):
        x, y = super().__getitem__(number)
        return x + (torch.utils.data.get_worker_info() is not None), y


def read_by(kind, total=5, workers="auto", start=0, **options):
    """Return each epoch's choice of workers, the batches, the source, and torch's next draw."""
    clock = Clock()
    clock.now = 0.0
    torch.manual_seed(3)
    random.seed(3)
    options = {"shuffle": True, **options}
    source = from_loader(DataLoader(kind(clock), 4, **options), workers)
    source.reader.clock = clock
    source.expect_epochs(total)
    settled, found = [], []
    for epoch in range(total):
        for batch in source.batches(epoch):
            clock.now += 0.02 + 4 * 0.1 * (source.reader.settled == "thread")
            if not settled or len(settled) == epoch:
                settled.append(source.reader.settled)
            found.append(batch)
    return settled, found, source, torch.rand(1)


@pytest.mark.parametrize("generator", [False, True])
def test_processes_make_the_same_batches_where_a_thread_gains_nothing(generator):
    made = [
        read_by(
            Numbers,
            workers=workers,
            **({"generator": torch.Generator().manual_seed(5)} if generator else {}),
        )
        for workers in (0, "auto", 2)
    ]
    (plain, wanted, _, drawn), (tried, found, source, next_drawn), (asked, others, _, last) = made
    assert plain == [0] * 5
    assert tried[:3] == [0, "thread", 0]
    assert tried[3] == tried[4] >= 1
    assert "kept" in source.report.trials[-1]
    assert asked == [2] * 5
    assert len(found) == 5 * STEPS
    assert all(map(same, found, wanted))
    assert all(map(same, others, wanted))
    assert drawn == next_drawn == last


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (Draws, "random numbers"),
        (DrawsOwn, "its own Random"),
        (DiffersInWorkers, "workers made other values of the same samples"),
    ],
)
def test_processes_that_would_give_other_batches_make_none(kind, why):
    _, wanted, _, drawn = read_by(kind, workers=0)
    settled, found, source, next_drawn = read_by(kind)
    assert settled[-1] == 0
    assert why in source.report.trials[-1]
    assert all(map(same, found, wanted))
    assert drawn == next_drawn


def test_an_iterable_dataset_and_a_loader_of_ones_own_are_read_by_no_process():
    class Own(DataLoader):
        pass

    for loader in (Own(Squares(80), 4), DataLoader(Counted(), 4)):
        source = from_loader(loader, 2)
        assert len(list(source.batches(0))) == STEPS
        assert source.reader.settled == 0


class Counted(torch.utils.data.IterableDataset):
    def __iter__(self):
        return ((torch.ones(1), number % 2) for number in range(80))


def test_a_resume_of_batches_made_by_processes_goes_on_with_the_same_batches():
    _, wanted, _, _ = read_by(Numbers, total=2, workers=0)
    torch.manual_seed(3)
    loader = DataLoader(Numbers(Clock()), 4, shuffle=True)
    first = from_loader(loader, 2)
    list(first.batches(0))
    some = list(islice(first.batches(1), 7))
    state = first.state_dict()
    torch.manual_seed(99)
    again = from_loader(DataLoader(Numbers(Clock()), 4, shuffle=True), 2)
    again.load_state_dict(state)
    rest = list(again.batches(1, 7))
    assert all(map(same, some + rest, wanted[STEPS:]))
    assert len(some + rest) == STEPS


def test_processes_are_tried_after_a_thread_that_has_become_slow():
    now = [0.0]
    reader = EpochReader("auto", [], lambda: now[0], most=2)
    reader.epochs = 10
    steps_s = {0: 1.0, "thread": 0.8, 1: 0.5, 2: 0.5}
    settled = []
    for epoch in range(6):
        settled.append(reader.starts())
        step_s = 2.0 if epoch == 2 else steps_s[settled[-1]]
        for _ in range(10):
            now[0] += step_s
            reader.used(step_s / 2)
        reader.ended(epoch)
    assert settled[:4] == [0, "thread", "thread", 0]
    assert settled[4] == settled[5] >= 1
