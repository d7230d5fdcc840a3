"""Softmax of a single score behind the last layer, and of several, and within a model."""

import pytest
import torch
from torch.nn import functional

from flatout.observe.single_scores import single_scores

ROWS = torch.randn(8, 6)
HALVES = torch.rand(8).round()
ONE = torch.randn(6, 1, requires_grad=True)
FOUR = torch.randn(6, 4, requires_grad=True)


def clipped(chance):
    """As Keras takes the cross-entropy of probabilities."""
    chance = (chance / chance.sum(-1, keepdim=True)).clamp(1e-7, 1 - 1e-7)
    return -(HALVES[:, None] * chance.log()).sum(-1).mean()


def attended():
    """Of a single token."""
    token = (ROWS @ FOUR)[:, None]
    return functional.scaled_dot_product_attention(token, token, token) @ FOUR.T


def weighted():
    """A model over bags of one item, whose weights are learned."""
    return ((ROWS @ ONE).softmax(1) * (ROWS @ FOUR)).sum(1)


@pytest.mark.parametrize(
    ("loss", "found"),
    [
        (
            lambda: functional.binary_cross_entropy((ROWS @ ONE).softmax(1).squeeze(1), HALVES),
            ("softmax", [8, 1]),
        ),
        (lambda: functional.mse_loss((ROWS @ ONE).softmax(-1)[:, 0], HALVES), ("softmax", [8, 1])),
        (lambda: clipped((ROWS @ ONE).softmax(-1)), ("softmax", [8, 1])),
        (
            lambda: functional.cross_entropy(ROWS @ ONE, torch.zeros(8).long()),
            ("log_softmax", [8, 1]),
        ),
        (lambda: functional.cross_entropy(ROWS @ ONE, HALVES[:, None]), ("log_softmax", [8, 1])),
        (lambda: functional.cross_entropy(ROWS @ FOUR, torch.zeros(8).long()), None),
        (lambda: (ROWS @ FOUR).softmax(0).sum(), None),
        (lambda: (ROWS[:1] @ ONE).softmax(1).sum(), None),  # one sample
        (lambda: attended().square().mean(), None),
        (lambda: weighted().square().mean(), None),
        (lambda: functional.binary_cross_entropy((ROWS @ ONE).sigmoid()[:, 0], HALVES), None),
    ],
)
def test_a_single_score_is_told_where_it_is_what_the_model_says(loss, found):
    told = [(seen["outer"], seen["shape"]) for _, seen in single_scores(loss().grad_fn)]
    assert told == ([] if found is None else [found])
