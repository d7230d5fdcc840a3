from __future__ import annotations

import os
import random
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Subset,
    get_worker_info,
)
from torch.utils.data import TensorDataset as Tensors

from flatout.data.batches.batch import named_tensors
from flatout.data.randomness import random_state, set_random_state
from flatout.data.source import as_source
from flatout.data.sources.arrays.arrays import ArraySource
from flatout.data.sources.datasets.dataset import dataset, from_loader
from flatout.errors import DataError


def same(a, b):
    pairs = zip(named_tensors("batch", a[:4]), named_tensors("batch", b[:4]), strict=True)
    return a.size == b.size and all(torch.equal(s, t) for (_, s), (_, t) in pairs)


class Squares(Dataset):
    """Sample i is (i, i * i)."""

    def __init__(self, samples):
        self.samples = samples

    def __len__(self):
        return self.samples

    def __getitem__(self, index):
        return torch.tensor([float(index)]), index * index


class Noisy(Squares):
    """Augmentation drawn from every global generator."""

    def __getitem__(self, index):
        noise = [*torch.rand(2).tolist(), random.random(), np.random.rand()]
        return torch.tensor([float(index), *noise], dtype=torch.float64), index


class Broken(Squares):
    def __getitem__(self, index):
        if index == 7:
            raise OSError("image file is truncated")
        return super().__getitem__(index)


class BrokenAtOnce(Broken):
    def __getitems__(self, indices):
        return [self[index] for index in indices]


class Ragged(Squares):
    def __getitem__(self, index):
        return torch.ones(index + 1), index


def _draws():
    return torch.rand(1).item(), random.random(), np.random.rand()


@given(st.data(), st.integers(1, 30), st.booleans(), st.booleans(), st.integers(0, 3))
@settings(deadline=None, max_examples=50)
def test_datasets_and_tensor_datasets_give_the_same(data, samples, shuffle, drop_last, epoch):
    options = {
        "batch_size": data.draw(st.integers(1, samples)),
        "shuffle": shuffle,
        "drop_last": drop_last,
        "seed": 5,
    }
    rows = torch.arange(samples)
    from_arrays = as_source(Tensors(rows.float().view(-1, 1), rows * rows), **options)
    assert isinstance(from_arrays, ArraySource)
    from_samples = as_source(Squares(samples), **options)
    whole = list(from_samples.batches(epoch))
    assert (len(whole), sum(batch.size for batch in whole)) == (
        from_samples.steps,
        from_samples.samples,
    )
    assert all(map(same, whole, from_arrays.batches(epoch)))
    start = data.draw(st.integers(0, from_samples.steps))
    resumed = list(from_samples.batches(epoch, start))
    assert len(resumed) == len(whole) - start
    assert all(map(same, resumed, whole[start:]))


def test_a_changed_tensor_dataset_is_a_dataset():
    class Doubled(Tensors):
        def __getitem__(self, index):
            return tuple(2 * part for part in super().__getitem__(index))

    source = as_source(Doubled(torch.ones(3), torch.ones(3)))
    assert next(source.batches(0)).inputs.tolist() == [2, 2, 2]


def test_workers_change_neither_order_nor_augmentation_nor_resume():
    expected = [list(dataset(Noisy(20), batch_size=4).batches(epoch)) for epoch in range(2)]
    for workers in (1, 2):
        source = dataset(Noisy(20), batch_size=4, workers=workers)
        for epoch in (0, 1, 0):
            batches = list(source.batches(epoch))
            assert len(batches) == 5
            assert all(map(same, batches, expected[epoch]))
        # Abandoned in the middle, then resumed in the middle.
        assert same(next(source.batches(1)), expected[1][0])
        resumed = list(source.batches(1, 3))
        assert len(resumed) == 2
        assert all(map(same, resumed, expected[1][3:]))


def test_augmentation_differs_by_epoch_and_by_seed():
    def noise(seed, epoch):
        source = dataset(Noisy(4), batch_size=4, shuffle=False, seed=seed)
        return next(source.batches(epoch)).inputs[:, 1:]

    first = noise(0, 0)
    for other in (noise(0, 1), noise(1, 0)):
        assert (other != first).all()


def test_reading_leaves_the_generators_of_the_process_alone():
    state = random_state()
    undisturbed = _draws()
    set_random_state(state)
    for workers in (0, 1):
        assert len(list(dataset(Noisy(8), batch_size=4, workers=workers).batches(0))) == 2
        assert _draws() == undisturbed
        set_random_state(state)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("kind", [Broken, BrokenAtOnce])
def test_an_error_names_the_sample(kind, workers):
    source = dataset(kind(12), batch_size=4, workers=workers)
    with pytest.raises(DataError, match="sample 7 cannot be read: OSError: image file is tr") as e:
        list(source.batches(0))
    assert "test_data_dataset.py:" in e.value.where
    trace = repr(e.value.__cause__) + "".join(getattr(e.value, "__notes__", []))
    assert "OSError" in trace


def test_an_error_inside_a_subset_names_the_sample_of_the_subset():
    with pytest.raises(DataError, match="sample 1 cannot be read"):
        list(dataset(Subset(Broken(12), [3, 7]), shuffle=False).batches(0))


def test_a_fault_of_reading_together_is_said():
    class Together(Squares):
        def __getitems__(self, indices):
            raise KeyError("index")

    with pytest.raises(DataError, match="cannot be read together: KeyError") as error:
        list(dataset(Together(3), shuffle=False).batches(0))
    assert error.value.where == "samples [0, 1, 2]"


@pytest.mark.parametrize("workers", [0, 1])
def test_samples_that_do_not_form_a_batch(workers):
    with pytest.raises(DataError, match="do not form a batch: RuntimeError") as error:
        list(dataset(Ragged(3), workers=workers, shuffle=False).batches(0))
    assert error.value.where == "samples [0, 1, 2]"


def test_a_collate_function_of_the_user():
    def pad(samples):
        inputs, targets = zip(*samples, strict=True)
        return torch.nn.utils.rnn.pad_sequence(list(inputs), batch_first=True), torch.tensor(
            targets
        )

    (batch,) = dataset(Ragged(3), shuffle=False, collate=pad).batches(0)
    assert batch.inputs.tolist() == [[1, 0, 0], [1, 1, 0], [1, 1, 1]]
    assert batch.indices.tolist() == [0, 1, 2]


def test_a_collate_function_may_leave_samples_out():
    source = dataset(Squares(4), shuffle=False, collate=lambda rows: torch.ones(len(rows) - 1))
    (batch,) = source.batches(0)
    assert (batch.size, batch.indices) == (3, None)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"batch_size": 9}, "batch_size is 9, but there are 8 samples"),
        ({"batch_size": 0}, "batch_size: expected an int of at least 1"),
        ({"workers": -1}, "workers: expected an int of at least 0, found -1"),
        ({"workers": 1.5}, "workers"),
    ],
)
def test_numbers_that_make_no_sense(options, words):
    with pytest.raises(DataError, match=words):
        dataset(Squares(8), **options)


def test_a_dataset_has_a_length_and_samples():
    with pytest.raises(DataError, match="the data is empty"):
        dataset(Squares(0))
    with pytest.raises(DataError, match=r"dict_keys: expected a Dataset with __getitem__"):
        dataset({}.keys())


def test_words_and_digest_of_a_dataset():
    source = dataset(Squares(1200), seed=3)
    assert (
        source.describe()
        == "1,200 samples of Squares, shuffled by seed 3, read by the main process"
    )
    assert source.digest == dataset(Squares(1200), batch_size=7).digest
    assert source.digest != dataset(Squares(1201)).digest
    assert source.digest != dataset(Noisy(1200)).digest
    assert source.labels_range() is None


# DataLoaders, as built


def _loader(samples=10, kind=Squares, **options):
    return DataLoader(kind(samples), batch_size=4, **options)


def test_a_loader_gives_what_a_plain_loop_gets():
    torch.manual_seed(3)
    expected = list(_loader(kind=Noisy, shuffle=True))
    torch.manual_seed(3)
    random.seed(0), np.random.seed(0)
    random_again = random_state()
    source = from_loader(_loader(kind=Noisy, shuffle=True))
    assert (source.steps, source.samples, source.batch_size) == (3, 10, 4)
    assert not source.seekable
    assert source.counted
    batches = list(source.batches(0))
    set_random_state(random_again)
    again = list(_loader(kind=Noisy, shuffle=True))
    for (x, y), (x2, y2), batch in zip(expected, again, batches, strict=True):
        # torch's draws, so also the order, do not depend on ours.
        assert torch.equal(x[:, :3], batch.inputs[:, :3])
        assert torch.equal(y, batch.targets)
        assert torch.equal(x2, batch.inputs)
        assert torch.equal(y2, batch.targets)
        assert batch.indices is None


def _own(loader_generator, sampler_generator, replacement=False):
    sampler = RandomSampler(
        Noisy(10),
        replacement=replacement,
        generator=torch.Generator().manual_seed(7) if sampler_generator else None,
    )
    generator = torch.Generator().manual_seed(8) if loader_generator else None
    return DataLoader(Noisy(10), batch_size=4, sampler=sampler, generator=generator)


@pytest.mark.parametrize("loader_generator", [True, False])
@pytest.mark.parametrize("sampler_generator", [True, False])
@pytest.mark.parametrize("replacement", [True, False])
@pytest.mark.parametrize("stop", [(0, 1), (0, 2), (0, 3), (1, 0), (1, 2), (1, 3)])
def test_a_loader_resumes_bit_for_bit(loader_generator, sampler_generator, replacement, stop):
    def run(source, epoch, step, until=None):
        """Steps that draw, as dropout does; what they saw, and the states at `until`."""
        seen = []
        while epoch < 3:
            for batch in source.batches(epoch, step):
                seen.append((batch, torch.rand(1).item()))
                step += 1
                if (epoch, step) == until:
                    return seen, random_state(), source.state_dict()
            epoch, step = epoch + 1, 0
            if (epoch, 0) == until:
                return seen, random_state(), source.state_dict()
        return seen, None, None

    options = (loader_generator, sampler_generator, replacement)
    start = random_state()
    whole, _, _ = run(from_loader(_own(*options)), 0, 0)
    set_random_state(start)
    before, state, source_state = run(from_loader(_own(*options)), 0, 0, stop)
    resumed = from_loader(_own(*options))
    torch.manual_seed(99)
    resumed.load_state_dict(source_state)
    set_random_state(state)
    after, _, _ = run(resumed, *stop)
    assert len(before) + len(after) == len(whole) == 9
    for (batch, drawn), (expected, expected_draw) in zip(before + after, whole, strict=True):
        assert same(batch, expected)
        assert drawn == expected_draw


def test_a_resume_at_the_end_of_an_epoch_may_begin_the_next():
    # RandomSampler draws once more when it ends: the state after the last step must include that.
    source = from_loader(_own(True, True))
    first = source.batches(0)
    for _ in range(3):
        next(first)
    state = source.state_dict()
    list(first)
    expected = [batch.inputs[:, 0] for batch in source.batches(1)]
    resumed = from_loader(_own(True, True))
    resumed.load_state_dict(state)
    found = [batch.inputs[:, 0] for batch in resumed.batches(1)]
    assert all(map(torch.equal, found, expected))


def test_peeking_into_a_loader_draws_nothing():
    source = from_loader(_own(True, False))
    before = random_state()
    undisturbed = _draws()
    set_random_state(before)
    peeked = source.peek(2)
    assert _draws() == undisturbed
    set_random_state(before)
    assert [batch.size for batch in peeked] == [4, 4]
    assert all(map(same, peeked, source.batches(0)))


def test_peeking_leaves_workers_that_persist_to_the_first_pass():
    def loader():
        return _loader(kind=Noisy, shuffle=True, num_workers=1, persistent_workers=True)

    torch.manual_seed(3)
    plain = loader()
    expected = [x for _ in range(2) for x, _ in plain]
    torch.manual_seed(3)
    source = from_loader(loader())
    source.peek(1)
    found = [batch.inputs for epoch in range(2) for batch in source.batches(epoch)]
    for x, y in zip(expected, found, strict=True):
        assert torch.equal(x[:, :3], y[:, :3])  # the order, and torch's draws in the worker


def test_the_sampler_hears_of_the_epoch():
    class Sampler(RandomSampler):
        heard = ()

        def set_epoch(self, epoch):
            self.heard = (*self.heard, epoch)

    sampler = Sampler(Squares(10))
    source = from_loader(DataLoader(Squares(10), batch_size=5, sampler=sampler))
    list(source.batches(0))
    list(source.batches(3))
    assert sampler.heard == (0, 3)


def test_loaders_of_other_shapes():
    assert from_loader(_loader(drop_last=True)).samples == 8
    unbatched = from_loader(DataLoader(Tensors(torch.ones(3, 4, 2)), batch_size=None))
    assert (unbatched.steps, unbatched.samples) == (3, None)
    assert next(unbatched.batches(0)).size == 4
    custom = from_loader(DataLoader(Squares(6), batch_sampler=[[0, 1, 2], [5]]))
    assert [batch.targets.tolist() for batch in custom.batches(0)] == [[0, 1, 4], [25]]
    assert (custom.samples, custom.batch_size, custom.steps) == (None, None, 2)


def test_a_loader_without_batches():
    with pytest.raises(DataError, match=r"no batches: its batch_size is 4, drop_last is True"):
        from_loader(_loader(3, drop_last=True))


# Iterable datasets


class Stream(IterableDataset):
    epoch = -1

    def __init__(self, samples=10):
        self.samples = samples

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        for i in random.sample(range(self.samples), self.samples):
            yield torch.tensor([float(i), self.epoch, torch.rand(1).item()]), i


def test_an_iterable_dataset_in_its_own_order():
    source = dataset(Stream(), batch_size=4)
    assert (source.seekable, source.counted, source.steps, source.batch_size) == (
        False,
        False,
        None,
        4,
    )
    assert "an unknown number of batches of Stream" in source.describe()


@pytest.mark.parametrize("workers", [0, 1])
def test_an_iterable_dataset_hears_of_the_epoch(workers):
    source = dataset(Stream(), batch_size=4, workers=workers)
    for epoch in (2, 5):
        batches = list(source.batches(epoch))
        assert [batch.size for batch in batches] == [4, 4, 2]
        assert sorted(torch.cat([batch.targets for batch in batches]).tolist()) == list(range(10))
        assert {row[1].item() for batch in batches for row in batch.inputs} == {float(epoch)}


def test_samples_of_an_iterable_dataset_with_a_length():
    class Sized(Stream):
        def __len__(self):
            return self.samples

    source = dataset(Sized(), batch_size=4)
    assert (source.steps, source.samples) == (3, 10)
    source = dataset(Sized(), batch_size=4, drop_last=True)
    assert (source.steps, source.samples) == (2, 8)


@pytest.mark.parametrize("workers", [0, 1])
def test_an_iterable_dataset_resumes_by_replay(workers):
    source = dataset(Stream(), batch_size=4, workers=workers)
    passing = source.batches(0)
    next(passing)
    state, drawn = source.state_dict(), random_state()
    expected = list(passing)
    resumed = dataset(Stream(), batch_size=4, workers=workers)
    resumed.load_state_dict(state)
    set_random_state(drawn)
    found = list(resumed.batches(0, 1))
    assert len(found) == 2
    assert all(map(same, found, expected))


def test_workers_never_double_an_iterable_dataset():
    source = dataset(Stream(), batch_size=5, workers=3)
    labels = torch.cat([batch.targets for batch in source.batches(0)])
    assert sorted(labels.tolist()) == list(range(10))


class Shared(Stream):
    """Samples that worker processes share; each sample names the process that made it."""

    def __len__(self):
        return self.samples

    def __iter__(self):
        worker = get_worker_info()
        first, many = (0, 1) if worker is None else (worker.id, worker.num_workers)
        for i in range(first, self.samples, many):
            yield torch.tensor([float(i), self.epoch, torch.rand(1).item(), os.getpid()]), i


def test_an_iterable_dataset_that_splits_its_samples_gets_all_workers():
    source = dataset(Shared(), batch_size=2, workers=2)
    assert source.steps is None
    epochs = [list(source.batches(epoch)) for epoch in (1, 1, 2)]
    for batches in epochs:
        rows = torch.cat([batch.inputs for batch in batches])
        assert sorted(rows[:, 0].tolist()) == list(range(10))
        assert len(set(rows[:, 3].tolist()) - {float(os.getpid())}) == 2
    first, again, next_one = ([batch.inputs[:, :3] for batch in each] for each in epochs)
    assert all(map(torch.equal, first, again))
    assert not all(map(torch.equal, first, next_one))


class Slow(Squares):
    def __getitem__(self, index):
        time.sleep(0.05 if index % 2 else 0)
        return super().__getitem__(index)


def test_slow_samples_do_not_change_the_order():
    source = dataset(Slow(12), batch_size=2, workers=2, shuffle=False)
    assert torch.cat([batch.indices for batch in source.batches(0)]).tolist() == list(range(12))
    found = torch.cat([batch.inputs[:, 0] for batch in source.batches(0)])
    assert found.tolist() == list(range(12))
