"""The parts of a batch know where in it they stand."""

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import flatout
from flatout.data.ranked import ranked
from flatout.data.source import as_source

X = torch.arange(23.0)[:, None]
SIZE = 5


@pytest.fixture(params=["arrays", "loader", "ready-made batches", "pipeline"])
def source(request, tmp_path):
    if request.param == "arrays":
        return as_source(X, X, batch_size=SIZE, shuffle=False)
    if request.param == "loader":
        return as_source(DataLoader(TensorDataset(X, X), batch_size=SIZE))
    if request.param == "pipeline":
        np.save(tmp_path / "x.npy", X.numpy())
        return flatout.data.npy(tmp_path / "x.npy").batch(SIZE)
    return as_source([(rows, rows) for rows in X.split(SIZE)])


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_each_sample_is_at_its_place(source, world_size):
    whole = X.split(SIZE)
    for rank in range(world_size):
        parts = ranked(source, rank, world_size).batches(0)
        for part, batch in zip(parts, whole, strict=True):
            assert world_size == 1 or part.whole == len(batch)
            for piece in part.split(2):
                assert torch.equal(piece.inputs, batch[piece.start : piece.start + piece.size])


def test_ranks_that_have_one_model_together_read_whole_batches(source):
    for rank in range(3):
        for part, batch in zip(
            ranked(source, rank, 3, whole=True).batches(0), X.split(SIZE), strict=True
        ):
            assert torch.equal(part.inputs, batch)
            assert (part.is_copy, part.copies, part.whole) == (rank < 2, 3, len(batch))


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("last", ["keep", "drop", "pad"])
@pytest.mark.parametrize("sharded", [False, True])
def test_a_function_of_batches_gets_them_whole_on_every_rank(last, sharded, world_size):
    def centered(inputs, targets):
        return inputs - inputs.mean(0), targets

    pipeline = flatout.data.arrays(X, X).batch(SIZE, last=last).map(centered)
    whole = list(pipeline.batches(0))
    parts = []
    for rank in range(world_size):
        own = pipeline.shard(rank, world_size) if sharded else pipeline
        parts.append(list(ranked(own, rank, world_size).batches(0)))
    assert len(whole) == (4 if last == "drop" else 5)
    for batch, *of_ranks in zip(whole, *parts, strict=True):
        assert torch.equal(torch.cat([part.inputs for part in of_ranks]), batch.inputs)
        assert sum(part.padding for part in of_ranks) == batch.padding


def test_a_cache_lasts_over_the_epochs_of_a_rank():
    calls = []

    def counted(inputs, targets):
        calls.append(int(inputs))
        return inputs, targets

    pipeline = flatout.data.arrays(X, X).map(counted).cache("memory").shuffle(1).batch(SIZE)
    list(ranked(pipeline, 0, 2).batches(0))
    before = len(calls)  # calls for the first look at the pipeline included
    for epoch in range(1, 8):
        list(ranked(pipeline, 0, 2).batches(epoch))  # each epoch of a training does the same
    later = calls[before:]
    assert len(later) == len(set(later)) <= len(X)


def test_the_cache_of_a_ranks_own_rows_lasts_too():
    calls = []

    def counted(inputs, targets):
        calls.append(int(inputs))
        return inputs, targets

    pipeline = flatout.data.arrays(X, X).map(counted).cache("memory").batch(SIZE)
    pipeline = pipeline.shard(0, 2, presharded=True)
    counts = []
    for epoch in range(3):
        agreed = pipeline.agreed(lambda own: [own, own])
        list(ranked(agreed, 0, 2).batches(epoch))
        counts.append(len(calls))
    assert len(set(counts)) == 1
