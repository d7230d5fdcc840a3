"""Padding in the targets of a loss: told by the ends of rows, and by what comes before."""

import pytest
import torch
from torch.nn import functional

from flatout.observe.loss_graphs import _nodes
from flatout.observe.padded_targets import padding_in

SAMPLES, PLACES, WORDS = 16, 12, 20


def targets(end=True):
    generator = torch.Generator().manual_seed(0)
    result = torch.zeros(SAMPLES, PLACES, dtype=torch.long)
    for row in result:
        length = int(torch.randint(3, 10, (), generator=generator))
        row[:length] = torch.randint(3, WORDS, (length,), generator=generator)
        if end:
            row[length] = 2
    return result


def scores():
    return torch.randn(SAMPLES, PLACES, 8) @ torch.randn(8, WORDS, requires_grad=True)


def found(loss):
    losses = ("NllLossBackward0", "NllLoss2DBackward0")
    (node,) = [node for node, _ in _nodes(loss.grad_fn) if node.name() in losses]
    return padding_in(node)


@pytest.mark.parametrize(
    "loss",
    [
        lambda y: functional.cross_entropy(scores().reshape(-1, WORDS), y.reshape(-1)),
        lambda y: functional.cross_entropy(scores().transpose(1, 2), y),
        lambda y: functional.cross_entropy(
            scores().transpose(0, 1).reshape(-1, WORDS), y.t().reshape(-1)
        ),
        lambda y: functional.nll_loss(scores().log_softmax(-1).view(-1, WORDS), y.flatten()),
        lambda y: functional.cross_entropy(scores()[:, 1:].reshape(-1, WORDS), y[:, 1:].flatten()),
    ],
)
@pytest.mark.parametrize("is_ended", [True, False])
def test_padding_is_told_and_whether_a_token_comes_before(loss, is_ended):
    y = targets(is_ended)
    seen = found(loss(y))
    assert (seen["value"], seen["padded"]) == (0, int((y == 0).sum()))
    assert seen["is_ended"] is is_ended


def test_what_the_loss_leaves_out_or_means_is_none():
    y, weight = targets(), torch.ones(WORDS)

    def flat(**given):
        return functional.cross_entropy(scores().flatten(0, 1), y.flatten(), **given)

    assert found(flat(ignore_index=0)) is None
    for ignored in (-100, -1):
        y = targets().masked_fill(targets() == 0, ignored)
        assert found(flat(ignore_index=ignored)) is None
    y = targets()
    assert found(flat(weight=weight)) is None
    assert found(flat(reduction="none").sum()) is None
    # A class that is found everywhere is no padding; classes of samples have no places.
    common = y * (torch.rand(y.shape) > 0.3)
    assert found(functional.cross_entropy(scores().transpose(1, 2), common)) is None
    assert found(functional.cross_entropy(scores()[:, 0], y[:, 0])) is None
