"""Batches whose samples a store has as features."""

import os
import random

import numpy as np
import pytest
import torch
from data_photographs import encoded, photo, write

import flatout
from flatout.data import FeatureRows, WatchedFiles, numbered, stays_with_rank
from flatout.data.execution import samples as made_samples
from flatout.data.ranked import ranked
from flatout.errors import DataError


class Kept:
    """A store in memory: the features of a sample are its slot, its label beside it."""

    def __init__(self, slots, targets):
        self.there = np.isin(np.arange(1000), slots)
        self.targets = targets

    def has(self, slots):
        return self.there[slots]

    def get(self, slots):
        assert self.there[slots].all()
        values = torch.from_numpy(np.stack([slots, slots], axis=1).astype(np.float32))
        return [values, *(part[slots] for part in self.targets)]


def rows_of(source, slots, *targets):
    found = numbered(source)
    assert not isinstance(found, str), found
    return FeatureRows(found, Kept(slots, targets), 1)


def made_by(x, y):
    """Not one of ours to look into: what it makes runs by sample."""
    return x * 2, y


@pytest.fixture
def table(tmp_path):
    path = tmp_path / "rows.svm"
    path.write_text("".join(f"{row % 5} 1:{row + 0.5} 2:{row}\n" for row in range(60)))
    return flatout.data.libsvm(path, layout="dense").shuffle(seed=3).batch(8)


def test_files_of_many_rows_are_looked_at_where_no_row_is_read(table, tmp_path):
    path = tmp_path / "rows.svm"
    files = numbered(flatout.data.libsvm(path, layout="dense").map(made_by).batch(8)).files
    assert [file.path for file in files] == [str(path)]
    watched, later = WatchedFiles(files, 0.0), WatchedFiles(files, 3600.0)
    watched.look(np.arange(3))
    later.look(np.arange(3))
    was = path.stat()
    path.write_bytes(path.read_bytes())
    os.utime(path, ns=(was.st_atime_ns, was.st_mtime_ns))
    later.look(np.arange(3))  # not yet due
    with pytest.raises(DataError, match="replaced or written while features of its rows"):
        watched.look(np.arange(3))
    cached = flatout.data.libsvm(path, layout="dense").cache("memory").batch(8)
    assert not numbered(cached).files  # its own copy stays


def test_rows_that_are_kept_are_not_made_and_the_order_stays(table, monkeypatch):
    asked = []
    make = made_samples.Decoded.make
    monkeypatch.setattr(
        made_samples.Decoded,
        "make",
        lambda self, numbers, *rest: asked.extend(numbers.tolist()) or make(self, numbers, *rest),
    )
    plain = list(table.batches(2))
    labels = torch.arange(60) % 5
    slots = np.arange(0, 60, 3)
    rows = rows_of(table, slots, labels.to(plain[0].targets.dtype))
    asked.clear()
    found = list(table.batches(2, 0, rows))
    assert not set(asked) & set(slots.tolist())
    assert len(found) == len(plain)
    for batch, whole in zip(found, plain, strict=True):
        assert torch.equal(batch.indices, whole.indices)
        assert torch.equal(batch.targets, whole.targets)
        assert batch.size == whole.size
        there = torch.from_numpy(np.isin(whole.indices.numpy(), slots))
        assert torch.equal(batch.kept.rows, there.nonzero().flatten())
        others = whole.inputs[~there]
        assert torch.equal(batch.inputs, others) if len(others) else batch.inputs == ()
        (values,) = batch.kept.values
        assert values[:, 0].tolist() == whole.indices[there].tolist()


@pytest.mark.parametrize("world", [1, 2])
def test_a_batch_that_is_kept_whole_has_no_inputs(table, world):
    table = table if world == 1 else table.shard(1, 2)
    plain = list(table.batches(1, 3))
    rows = rows_of(table, np.arange(60), (torch.arange(60) % 5).to(plain[0].targets.dtype))
    for batch, whole in zip(table.batches(1, 3, rows), plain, strict=True):
        assert batch.inputs == ()
        assert torch.equal(batch.indices, whole.indices)
        assert torch.equal(batch.targets, whole.targets)
        assert len(batch.kept.rows) == whole.size


def test_several_ranks_pass_features_on(table):
    rows = rows_of(table, np.arange(60), torch.arange(60) % 5)
    part = ranked(table, 1, 2)
    for batch, whole in zip(part.batches(0, 0, rows), part.batches(0), strict=True):
        assert torch.equal(batch.indices, whole.indices)
        assert (batch.start, batch.whole) == (whole.start, whole.whole)
        assert batch.inputs == ()


def test_samples_stay_with_their_rank_where_nothing_is_shuffled_over_ranks(table, folder):
    images = flatout.data.images(folder)
    x, y = torch.arange(12.0).reshape(6, 2), torch.arange(6)
    moving = [table, images.shuffle(seed=1).batch(2), flatout.data.as_source((x, y), batch_size=2)]
    staying = [images.batch(2), flatout.data.as_source((x, y), batch_size=2, shuffle=False)]
    staying.append(images.shard(0, 2, by="rows").shuffle(seed=1).batch(2))
    for source, expected in [*((one, False) for one in moving), *((one, True) for one in staying)]:
        assert stays_with_rank(source) is expected
        part = ranked(source, 0, 2)
        read = [
            [row for b in part.batches(epoch) for row in b.indices.tolist()] for epoch in (0, 1)
        ]
        assert (sorted(read[0]) == sorted(read[1])) is expected


def test_what_fills_up_a_batch_is_made_as_ever(table):
    padded = table.with_stages([*table.stages[:-1]]).batch(8, last="pad")
    plain = list(padded.batches(0))
    rows = rows_of(padded, np.arange(60), (torch.arange(60) % 5).to(plain[0].targets.dtype))
    found = list(padded.batches(0, 0, rows))
    assert [batch.kept is None for batch in found] == [False] * 7 + [True]
    assert torch.equal(found[-1].inputs, plain[-1].inputs)
    assert torch.equal(found[-1].weight, plain[-1].weight)


@pytest.fixture
def folder(tmp_path):
    for number in range(10):
        content = encoded(photo(24, 24, number), "PNG")
        write(tmp_path / "images" / "ab"[number % 2] / f"{number}.png", content)
    return tmp_path / "images"


def test_an_image_that_cannot_be_read_is_left_out_beside_kept_ones(folder):
    path = folder / "a" / "4.png"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 255
    path.write_bytes(bytes(content))
    data = flatout.data.images(folder, on_error="skip").batch(5)
    rows = rows_of(data, [0, 1, 5, 6], torch.tensor([0] * 5 + [1] * 5))
    plain = list(flatout.data.images(folder, on_error="skip").batch(5).batches(0))
    assert [batch.size for batch in plain] == [4, 5]
    for batch, whole in zip(data.batches(0, 0, rows), plain, strict=True):
        assert torch.equal(batch.indices, whole.indices)
        assert torch.equal(batch.targets, whole.targets)
        others = ~torch.isin(whole.indices, torch.tensor([0, 1, 5, 6]))
        assert torch.equal(batch.inputs, whole.inputs[others])


def test_an_image_with_the_size_and_time_of_another_is_another(folder):
    def content():
        return numbered(flatout.data.images(folder).batch(5)).content()

    before = content()
    assert before == content()
    path = folder / "b" / "3.png"
    times = os.stat(path)
    path.write_bytes(path.read_bytes())
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert os.stat(path).st_mtime_ns == times.st_mtime_ns
    assert content() != before


def test_arrays_are_numbered_by_the_bytes_of_their_inputs():
    x, y = torch.arange(12.0).reshape(6, 2), torch.arange(6)

    def content(*data):
        found = numbered(flatout.data.as_source(data, batch_size=2))
        assert found.slots == 6
        assert found.comes_whole
        return found.content()

    before = content(x, y)
    assert content(x, y + 1) == before
    assert numbered(flatout.data.arrays(x).batch(3)).content() == before
    x[3, 1] += 1
    assert content(x, y) != before


def noisy(x, y, rng):
    return x + rng.random(), y


def drawn(x, y):
    return x + random.random(), y


@pytest.mark.parametrize("function", [noisy, drawn])
def test_what_is_random_is_not_numbered(table, function):
    source = table.with_stages(table.stages[:1]).map(function).batch(8)
    assert "random" in numbered(source)


def test_functions_of_whole_batches_and_streams_are_not_numbered(table, tmp_path):
    assert "whole batches" in numbered(table.map(made_by))
    assert isinstance(numbered(flatout.data.as_source([(torch.ones(2, 1), torch.ones(2))])), str)


def test_each_variant_of_a_sample_has_its_slot(folder):
    data = flatout.data.images(folder).augment(flip="horizontal")
    found = numbered(data.batch(10))
    assert found.slots == 20
    plain = flatout.data.images(folder).batch(10).peek(1)[0].inputs
    for epoch in range(3):
        (batch,) = data.batch(10).batches(epoch)
        slots = torch.from_numpy(found.slots_of(batch.indices.numpy(), epoch))
        assert torch.equal(slots // 2, batch.indices)
        for image, slot in zip(batch.inputs, slots, strict=True):
            whole = plain[slot // 2]
            assert torch.equal(image, whole if slot % 2 == 0 else whole.flip(-1)), slot


def test_what_is_drawn_without_end_is_not_numbered(folder):
    data = flatout.data.images(folder)
    assert "views=K" in numbered(data.augment(crop=8, padding=200).batch(5))
    assert numbered(data.augment(crop=8, padding=200, views=4).batch(5)).slots == 40


def test_a_row_that_comes_several_times_is_found_by_the_variant_of_each(tmp_path):
    for number in range(12):
        content = encoded(photo(24, 24, number), "PNG")
        write(tmp_path / "images" / "ab"[number > 8] / f"{number:02}.png", content)
    data = flatout.data.images(tmp_path / "images", on_error="skip").augment(flip="horizontal")
    data = data.balance("over", seed=1).shuffle(seed=2).batch(5)
    (tmp_path / "images" / "b" / "10.png").write_bytes(b"")  # is left out each time
    slots = np.delete(np.arange(0, 24, 3), 7)  # all but the bad row's
    rows = rows_of(data, slots, torch.zeros(24, dtype=torch.int64))
    for plain, found in zip(data.batches(1), data.batches(1, 0, rows), strict=True):
        assert torch.equal(plain.indices, found.indices)
        assert torch.equal(plain.turns, found.turns)
        if found.kept is None:
            assert torch.equal(plain.inputs, found.inputs)
            continue
        own = rows.samples.slots_of(plain.indices.numpy(), plain.turns.numpy())
        there = torch.from_numpy(np.isin(own, slots))
        assert torch.equal(found.kept.rows, there.nonzero().flatten())
        assert found.kept.values[0][:, 0].tolist() == own[there].tolist()
        assert torch.equal(plain.inputs[~there], found.inputs) if len(found.inputs) else there.all()
