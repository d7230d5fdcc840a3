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
