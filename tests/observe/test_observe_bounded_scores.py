"""Scores that an activation bounds right before a loss that takes any."""

import pytest
import torch
from torch.nn import functional

from flatout.observe.loss_graphs import _LOSSES, _nodes, _twice

KINDS = torch.randint(0, 4, (8,))
HALVES = torch.rand(8, 4).round()


def scores():
    return torch.randn(8, 6) @ torch.randn(6, 4, requires_grad=True)


def entropy(given):
    return functional.cross_entropy(given, KINDS)


def of_two(given):
    return functional.binary_cross_entropy_with_logits(given, HALVES)


@pytest.mark.parametrize(
    ("loss", "found"),
    [
        (lambda: entropy(scores().relu()), ("cross_entropy", "ReLU")),
        (lambda: entropy(scores().tanh().view(8, 4)), ("cross_entropy", "tanh")),
        (lambda: of_two(scores().relu()), ("binary_cross_entropy_with_logits", "ReLU")),
        (lambda: of_two(scores().tanh()), ("binary_cross_entropy_with_logits", "tanh")),
        (lambda: entropy(functional.linear(scores().relu(), torch.ones(4, 4))), None),
        (lambda: entropy(10 * scores().tanh()), None),  # as in policies
        (lambda: entropy(functional.leaky_relu(scores())), None),
        (lambda: functional.softmax(scores().relu(), -1).sum(), None),  # as attention may
        (lambda: functional.log_softmax(scores().relu(), -1).sum(), None),
        (lambda: entropy(scores()), None),
        (lambda: of_two(scores()), None),
    ],
)
def test_scores_are_bounded_right_before_a_loss_alone(loss, found):
    nodes = [(node, above) for node, above in _nodes(loss().grad_fn) if node.name() in _LOSSES]
    signs = [sign for node, above in nodes for sign in _twice(node, node.name(), above)]
    told = [(sign.detail["outer"], sign.detail["by"]) for sign in signs if sign.kind == "bounded"]
    assert told == ([] if found is None else [found])
