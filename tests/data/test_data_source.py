from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from flatout.data.source import as_source
from flatout.data.sources.arrays.arrays import Arrays, ArraySource, array_source
from flatout.data.sources.datasets.iterable import IterableSource
from flatout.data.sources.datasets.tuned_dataset import TunedDatasetSource
from flatout.errors import DataError

X = torch.arange(12.0).view(6, 2)
Y = torch.arange(6)
W = torch.rand(6)


class Samples(Dataset):
    def __len__(self):
        return 6

    def __getitem__(self, index):
        return X[index], Y[index]


class Stream(IterableDataset):
    def __iter__(self):
        return zip(X, Y, strict=True)


def _stream():
    yield X[:3], Y[:3]


@pytest.mark.parametrize(
    ("train", "y", "kind"),
    [
        (X, Y, ArraySource),
        (X.numpy(), Y.numpy(), ArraySource),
        ((X, X), Y, ArraySource),
        ([X, X.numpy()], {"a": Y, "b": Y}, ArraySource),
        ({"a": X, "b": [X]}, Y, ArraySource),
        ((X, Y), None, ArraySource),
        ((X, Y, W), None, ArraySource),
        (((X, X), Y), None, ArraySource),
        ((X,), None, ArraySource),
        (X, None, ArraySource),
        ({"a": X}, None, ArraySource),
        (Arrays(X, Y), None, ArraySource),
        (TensorDataset(X, Y), None, ArraySource),
        (TensorDataset(X, Y, W), None, ArraySource),
        (Samples(), None, TunedDatasetSource),
        (Stream(), None, IterableSource),
        (DataLoader(Samples(), batch_size=3), None, IterableSource),
        ([(X, Y)], None, IterableSource),
        (_stream, None, IterableSource),
        (_stream(), None, IterableSource),
    ],
)
def test_everything_becomes_batches(train, y, kind):
    source = as_source(train, y, batch_size=None, shuffle=False)
    assert type(source) is kind
    batch = source.peek(1)[0]
    inputs = batch.inputs
    while not isinstance(inputs, torch.Tensor):
        inputs = inputs["a"] if isinstance(inputs, dict) else inputs[0]
    assert torch.equal(inputs, X[: batch.size])
    assert isinstance(source.describe(), str)
    assert len(source.digest) == 16
    source.load_state_dict(source.state_dict())
    again = next(source.batches(0))
    assert (again.indices is None) == (kind is IterableSource)
    assert again.size == batch.size


def test_parts_land_where_they_belong():
    (batch,) = as_source((X, Y, W), batch_size=6, shuffle=False).batches(0)
    assert torch.equal(batch.targets, Y)
    assert torch.equal(batch.weight, W)
    (batch,) = as_source([X, X], {"a": Y}, batch_size=6).batches(0)
    assert isinstance(batch.inputs, tuple)
    assert torch.equal(batch.targets["a"], batch.indices)


def test_options_reach_the_source():
    for train in (TensorDataset(X, Y), Samples()):
        source = as_source(train, batch_size=4, shuffle=True, seed=3, drop_last=True)
        other = as_source((X, Y), batch_size=4, shuffle=True, seed=3, drop_last=True)
        assert source.steps == 1
        assert torch.equal(next(source.batches(2)).targets, next(other.batches(2)).targets)
    assert as_source(X, batch_size=99, clip_batch=True).batch_size == 6
    assert as_source(X).batch_size == 6
    assert as_source(torch.zeros(100)).batch_size == 32


def test_a_source_is_taken_as_it_is():
    source = array_source(X, Y, batch_size=2)
    assert as_source(source) is source
    assert as_source(source, batch_size=2) is source

    class Own(ArraySource):
        pass

    own = Own(source.data, source.plan)
    assert as_source(own) is own


def test_a_source_that_is_a_dataset_too_is_a_source():
    class Both(Dataset, ArraySource):
        pass

    both = Both(Arrays(X), array_source(X, batch_size=2).plan)
    assert as_source(both) is both


@pytest.mark.parametrize(
    ("train", "y", "words"),
    [
        (3, None, "nothing here reads int as data"),
        (None, None, "nothing here reads NoneType as data"),
        (nn.Linear(2, 2), None, "nothing here reads Linear as data"),
        (Samples, None, "nothing here reads type as data"),
        ("data/mnist", None, "found the path 'data/mnist'"),
        (Path("data/mnist"), None, "found the path"),
        (Samples(), Y, "y goes with arrays, and Samples is none"),
        ([(X, Y)], np.ones(3, object), "y: expected numbers|targets: expected numbers"),
        ([[1.0], [2.0]], Y, "y goes with arrays, and list is none"),
        ((X, Y, W, W), None, "found 4 parts"),
        ((), None, "found 0 parts"),
        ((X, Y[:4]), None, "inputs and targets differ in length: 6 and 4 samples"),
        (X[:0], None, "the data is empty"),
        (np.array([{}, {}], object), None, "an array of Python objects"),
        (([1, 2], [3, 4]), None, r"inputs\[0\]: expected a tensor or a numpy array, found int"),
        ([1, 2], None, "inputs: expected a tensor or a numpy array, found int"),
    ],
)
def test_wrong_input_is_named(train, y, words):
    with pytest.raises(DataError, match=words):
        list(as_source(train, y).batches(0))


def test_an_unknown_type_hears_what_is_taken():
    with pytest.raises(DataError) as error:
        as_source(3)
    for word in ("numpy", "Dataset", "DataLoader", "iterable", "flatout.data"):
        assert word in error.value.do


def test_a_batch_size_against_that_of_a_loader():
    loader = DataLoader(Samples(), batch_size=3)
    assert as_source(loader, batch_size=3).batch_size == 3
    with pytest.raises(DataError, match=r"batch_size is 4, but the DataLoader makes its own .* 3"):
        as_source(loader, batch_size=4)
    assert as_source(_stream, batch_size=4).batch_size is None
