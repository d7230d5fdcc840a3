"""Data that do not fit the model are named before anything is trained."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import flatout
from flatout.errors import DataError


def fit(model, x, y, loss="cross_entropy", **options):
    trainer = flatout.Trainer(model, loss=loss, say=lambda line: None)
    return trainer.fit((x, y), batch_size=4, progress=False, **options)


def linear():
    return nn.Sequential(nn.Flatten(), nn.Linear(6, 3))


LABELS = torch.tensor([0, 1, 2, 0, 1, 2, 0, 1])


def test_a_wrong_dtype_names_both():
    with pytest.raises(DataError, match="float64") as caught:
        fit(linear(), np.random.rand(8, 6), LABELS)
    assert "to float32" in str(caught.value)


def test_a_wrong_shape_names_the_batch_and_the_first_layer():
    with pytest.raises(DataError) as caught:
        fit(linear(), torch.rand(8, 5), LABELS)
    assert "(4, 5)" in str(caught.value)
    assert "in_features=6" in str(caught.value)


def test_targets_that_the_loss_does_not_take():
    with pytest.raises(DataError, match="targets"):
        fit(linear(), torch.rand(8, 6), torch.rand(8, 7, 2))


@pytest.mark.parametrize("label", [3, -1, 255])
def test_a_label_out_of_range_names_label_and_sample(label):
    labels = LABELS.clone()
    labels[6] = label
    with pytest.raises(DataError) as caught:
        fit(linear(), torch.rand(8, 6), labels, shuffle=False)
    assert str(label) in str(caught.value)
    assert "sample 6" in str(caught.value)


def test_an_ignored_label_is_none_out_of_range():
    labels = LABELS.clone()
    labels[6] = -100
    assert fit(linear(), torch.rand(8, 6), labels).epochs[0]["loss"] > 0


def test_nothing_is_changed_by_data_that_do_not_fit():
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
    before = {k: v.clone() for k, v in model.state_dict().items()}
    x, y = torch.rand(8, 6), torch.rand(8, 7, 2)
    state = torch.get_rng_state()
    with pytest.raises(DataError):
        fit(model, x, y)
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert torch.equal(state, torch.get_rng_state())


def test_empty_data_and_batches_larger_than_the_data():
    with pytest.raises(DataError, match="empty"):
        fit(linear(), torch.rand(0, 6), LABELS[:0])
    with pytest.raises(DataError, match="3"):
        fit(linear(), torch.rand(3, 6), LABELS[:3])
