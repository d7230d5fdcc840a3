from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flatout.data.batches.batch import Batch, Features, KeptFeatures, map_tensors, named_tensors

CPU = torch.device("cpu")


def _batch(size):
    rows = torch.arange(size)
    inputs = {"image": rows.view(-1, 1).float(), "more": (rows + 1, rows.bool())}
    return Batch(inputs, rows * 2, rows / 7, rows + 100, size)


def _leaves(batch):
    return [tensor for _, tensor in named_tensors("batch", batch[:4])]


@settings(deadline=None)
@given(st.integers(1, 40), st.integers(1, 50))
def test_split_gives_nearly_equal_views_in_order(size, n):
    whole = _batch(size)
    pieces = whole.split(n)
    sizes = [piece.size for piece in pieces]
    assert len(pieces) == min(n, size)
    assert sum(sizes) == size
    assert max(sizes) - min(sizes) <= 1
    for number, tensor in enumerate(_leaves(whole)):
        parts = [_leaves(piece)[number] for piece in pieces]
        assert [len(part) for part in parts] == sizes
        assert torch.equal(torch.cat(parts), tensor)
        assert parts[0].data_ptr() == tensor.data_ptr()


def test_split_into_one_is_the_batch_itself():
    batch = _batch(3)
    assert batch.split(1)[0] is batch


def test_split_keeps_what_is_not_there():
    batch = Batch(torch.arange(4), None, None, None, 4)
    assert [piece[1:5] for piece in batch.split(2)] == [(None, None, None, 2)] * 2


def test_to_is_nothing_where_the_batch_already_is():
    batch = _batch(3)
    assert batch.to(CPU) is batch
    assert batch.to(torch.device("cpu", 0)).inputs["image"].device.type == "cpu"


def test_to_moves_all_but_the_indices():
    moved = _batch(3).to(torch.device("meta"))
    assert {tensor.device.type for tensor in _leaves(moved._replace(indices=None))} == {"meta"}
    assert moved.indices.device == CPU


@pytest.mark.gpu
def test_to_a_gpu_and_no_further():
    cuda = torch.device("cuda")
    moved = _batch(3).to(cuda, non_blocking=True)
    assert torch.equal(moved.targets.cpu(), _batch(3).targets)
    assert moved.to(cuda) is moved
    assert moved.to(torch.device("cuda:0")) is moved


def test_memory_format_changes_images_only():
    images = torch.randn(2, 3, 4, 4)
    masks = torch.zeros(2, 3, 4, 4, dtype=torch.uint8)
    batch = Batch((images, masks, torch.randn(2, 5)), None, None, None, 2)
    laid = batch.to_memory_format(torch.channels_last)
    assert laid.inputs[0].is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(laid.inputs[0], images)
    assert laid.inputs[1] is masks
    assert laid.inputs[2] is batch.inputs[2]
    assert laid.to_memory_format(torch.channels_last) is laid
    assert torch.equal(laid.to_memory_format(torch.contiguous_format).inputs[0], images)


def test_names_say_where_a_tensor_is():
    names = [name for name, _ in named_tensors("inputs", _batch(1).inputs)]
    assert names == ["inputs['image']", "inputs['more'][0]", "inputs['more'][1]"]
    assert map_tensors(len, {"a": (torch.ones(2), None)}) == {"a": (2, None)}


def test_features_stay_features_whatever_is_done_to_their_batch():
    values = Features((torch.arange(6.0).reshape(3, 2), torch.arange(3)))
    batch = Batch(values, torch.arange(3), None, torch.arange(3), 3)
    for piece, size in zip(batch.split(2), (2, 1), strict=True):
        assert isinstance(piece.inputs, Features)
        assert [len(part) for part in piece.inputs] == [size, size]


def test_kept_rows_go_to_a_device_with_the_others():
    kept = KeptFeatures(Features((torch.ones(2, 3),)), torch.tensor([0, 2]))
    batch = Batch(torch.zeros(1, 4), torch.arange(3), None, torch.arange(3), 3, kept=kept)
    assert batch.to(torch.device("cpu")) is batch
    moved = batch.to(torch.device("meta"))
    assert {tensor.device.type for tensor in moved.tensors()} == {"meta"}
    assert moved.kept.rows.device.type == "cpu"
    assert isinstance(moved.kept.values, Features)
