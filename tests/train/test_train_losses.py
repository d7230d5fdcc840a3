"""Losses as (sum, weight) against torch's own."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from flatout.data.batch import Batch, split
from flatout.errors import ModelError
from flatout.train.losses import as_loss


def batch_of(targets, weight=None):
    return Batch(torch.zeros(len(targets)), targets, weight, None, len(targets))


def mean_of(value, size):
    return value[0] / value[1] if isinstance(value, tuple) else value


CASES = {
    "cross_entropy": (torch.randn(12, 5), torch.randint(0, 5, (12,)), F.cross_entropy),
    "nll": (torch.randn(12, 5).log_softmax(1), torch.randint(0, 5, (12,)), F.nll_loss),
    "binary_cross_entropy": (
        torch.randn(12),
        torch.randint(0, 2, (12,)).float(),
        F.binary_cross_entropy_with_logits,
    ),
    "mse": (torch.randn(12, 3), torch.randn(12, 3), F.mse_loss),
    "mae": (torch.randn(12, 3), torch.randn(12, 3), F.l1_loss),
    "huber": (torch.randn(12, 3), torch.randn(12, 3), F.huber_loss),
}


@pytest.mark.parametrize("name", CASES)
def test_a_standard_loss_is_torchs(name):
    output, target, reference = CASES[name]
    value = as_loss(name)(output, batch_of(target))
    torch.testing.assert_close(mean_of(value, 12), reference(output, target))


@pytest.mark.parametrize("name", CASES)
def test_micro_batches_add_up_to_the_whole(name):
    output, target, reference = CASES[name]
    loss = as_loss(name)
    total = weight = 0.0
    for rows in (slice(0, 5), slice(5, 6), slice(6, 12)):
        value = loss(output[rows], batch_of(target[rows]))
        size = len(target[rows])
        part, part_weight = value if isinstance(value, tuple) else (value * size, size)
        total, weight = total + part, weight + part_weight
    torch.testing.assert_close(torch.as_tensor(total / weight), reference(output, target))


def test_ignored_targets_carry_no_weight():
    output = torch.randn(8, 4)
    target = torch.tensor([0, -100, 2, 3, -100, -100, 1, 0])
    total, weight = as_loss("cross_entropy")(output, batch_of(target))
    assert int(weight) == 5
    torch.testing.assert_close(total / weight, F.cross_entropy(output, target))
    # Weighing the pieces by their samples instead would be another number.
    pieces = [F.cross_entropy(output[a:b], target[a:b]) * (b - a) for a, b in ((0, 3), (3, 8))]
    assert not torch.isclose(sum(pieces) / 8, total / weight)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_class_weights_normalise_as_torchs(smoothing):
    output, target = torch.randn(9, 3), torch.tensor([0, 1, 2, 2, -100, 1, 0, 0, 2])
    module = nn.CrossEntropyLoss(torch.tensor([1.0, 2.0, 0.5]), label_smoothing=smoothing)
    total, weight = as_loss(module)(output, batch_of(target))
    torch.testing.assert_close(total / weight, module(output, target))


def test_sample_weights_weigh_samples():
    output, target = torch.randn(6, 3), torch.randint(0, 3, (6,))
    weight = torch.tensor([1.0, 0.0, 2.0, 1.0, 0.5, 0.0])
    total, whole = as_loss("cross_entropy")(output, batch_of(target, weight))
    each = F.cross_entropy(output, target, reduction="none")
    torch.testing.assert_close(total, (each * weight).sum())
    assert float(whole) == 4.5


def test_half_precision_outputs_are_summed_in_float32():
    output, target = torch.randn(64, 10), torch.randint(0, 10, (64,))
    value = as_loss("cross_entropy")(output.bfloat16(), batch_of(target), unweighted=True)
    assert value.dtype == torch.float32
    torch.testing.assert_close(value, F.cross_entropy(output.bfloat16().float(), target))


def test_a_column_of_outputs_fits_a_row_of_targets():
    output, target = torch.randn(5, 1), torch.randn(5)
    value = as_loss("mse")(output, batch_of(target))
    torch.testing.assert_close(mean_of(value, 5), F.mse_loss(output[:, 0], target))


def test_callables_give_a_mean_or_sum_and_weight():
    output, target = torch.randn(5), torch.randn(5)
    mean = as_loss(lambda o, t: (o - t).abs().mean())(output, batch_of(target))
    assert mean.dim() == 0
    total, weight = as_loss(lambda o, t: ((o - t).abs().sum(), 5))(output, batch_of(target))
    torch.testing.assert_close(total / weight, mean)


@pytest.mark.parametrize(
    ("loss", "words"),
    [("crossentropy", "known: cross_entropy"), (3, "a name or a callable")],
)
def test_what_is_no_loss_is_refused(loss, words):
    with pytest.raises(ModelError, match=words):
        as_loss(loss)


def test_a_vector_is_no_loss():
    loss = as_loss(lambda o, t: (o - t) ** 2)
    with pytest.raises(ModelError, match="one number or"):
        loss(torch.randn(3), batch_of(torch.randn(3)))


def test_sample_weights_need_a_loss_that_takes_them():
    loss = as_loss(lambda o, t: (o - t).mean())
    with pytest.raises(ModelError, match="sample weights"):
        loss(torch.randn(3), batch_of(torch.randn(3), torch.ones(3)))


def test_split_batches_keep_targets_and_weights_together():
    whole = Batch(torch.arange(7.0), torch.arange(7), torch.arange(7.0), torch.arange(7), 7)
    pieces = split(whole, 3)
    assert [p.size for p in pieces] == [3, 2, 2]
    assert torch.equal(torch.cat([p.weight for p in pieces]), whole.weight)
