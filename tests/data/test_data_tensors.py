from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch

from flatout.data.batches.batch import Batch
from flatout.data.batches.tensors import as_batch, as_tensor, as_tensors, parts_of
from flatout.errors import DataError


def test_numpy_arrays_share_their_memory_and_keep_their_dtype():
    array = np.random.rand(4, 3)
    tensor = as_tensor("inputs", array)
    assert tensor.dtype == torch.float64
    array[2, 1] = 5
    assert tensor[2, 1] == 5


def test_read_only_memory_is_taken_without_a_warning():
    array = np.frombuffer(bytes(range(12)), np.uint8).reshape(4, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert as_tensor("inputs", array).tolist() == array.tolist()


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6.0)[::-1],
        np.arange(6, dtype=">i4"),
        np.arange(12, dtype=np.int16).reshape(3, 4).T,
        np.array([(1, 2.0), (3, 4.0)], dtype=[("a", "i2"), ("b", "f8")])["b"],
    ],
    ids=["backwards", "big endian", "transposed", "field of records"],
)
def test_odd_layouts_keep_their_values(array):
    assert as_tensor("inputs", array).tolist() == array.tolist()


def test_whatever_numpy_reads_is_an_array():
    class Column:
        def __array__(self, dtype=None, copy=None):
            return np.array([1, 2])

    assert as_tensor("inputs", Column()).tolist() == [1, 2]


def test_structures_keep_their_form():
    tensors = as_tensors("inputs", {"a": np.ones(2), "b": [np.ones(2), torch.zeros(2)]})
    assert list(tensors) == ["a", "b"]
    assert isinstance(tensors["b"], tuple)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (np.array([[1], [1, 2]], object), "inputs: expected numbers, found an array of Python obj"),
        (np.array(["cat", "dog"]), "inputs: expected numbers, found dtype <U3"),
        (np.array(["2026-01-01"], "M8[D]"), "found dtype datetime64"),
        (np.zeros(2, np.longdouble), "torch has no dtype for numpy's"),
        ([1.0, 2.0], r"inputs\[0\]: expected a tensor or a numpy array, found float"),
        ({"a": "text"}, r"inputs\['a'\]: expected a tensor or a numpy array, found str"),
        ((), "found an empty tuple"),
        (torch.eye(2).to_sparse(), "found layout torch.sparse_coo"),
    ],
)
def test_what_holds_no_numbers_is_named(value, words):
    with pytest.raises(DataError, match=words):
        as_tensors("inputs", value)


def test_parts():
    assert parts_of(3) == (3, None, None)
    assert parts_of([3]) == (3, None, None)
    assert parts_of((3, 4)) == (3, 4, None)
    assert parts_of((3, 4, 5)) == (3, 4, 5)
    with pytest.raises(DataError, match="found 4 parts") as error:
        parts_of((1, 2, 3, 4))
    assert "((a, b), y)" in error.value.do


def test_a_batch_from_a_loader():
    batch = as_batch([np.ones((3, 2)), torch.arange(3), np.ones(3)], "batch 0")
    assert batch.size == 3
    assert batch.indices is None
    assert batch.weight.shape == (3,)
    assert as_batch(batch, "batch 1") is batch
    assert as_batch({"a": torch.ones(2)}, "batch 2").targets is None


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ((torch.ones(3), torch.ones(2)), "inputs and targets differ in length: 3 and 2 samples"),
        ((torch.ones(3), torch.tensor(1.0)), "targets: expected a row per sample"),
        ((torch.ones(2), None, torch.ones(2, 1)), r"weight: .* found shape \(2, 1\)"),
        ((torch.ones(0, 3),), "the batch is empty"),
        (
            {"text": ["a"], "id": torch.ones(1)},
            r"inputs\['text'\]\[0\]: expected a tensor .* found str",
        ),
        ("text", "found str"),
    ],
)
def test_a_bad_batch_is_named(value, words):
    with pytest.raises(DataError, match=words) as error:
        as_batch(value, "epoch 1, batch 7")
    assert error.value.where == "epoch 1, batch 7"


def test_weights_may_come_without_targets():
    assert isinstance(as_batch((torch.ones(2), None, torch.ones(2)), "here"), Batch)


@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
def test_nested_tensors_are_refused_with_what_to_do(layout):
    nested = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(1, 3)], layout=layout)
    with pytest.raises(
        DataError, match="inputs: expected a dense tensor, found a nested"
    ) as caught:
        as_tensor("inputs", nested)
    assert "to_padded_tensor" in caught.value.do
