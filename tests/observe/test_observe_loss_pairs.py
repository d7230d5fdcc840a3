"""[N, 1] against [N] where both depend on parameters, as an agent's values and its targets."""

import pytest
import torch
from torch.nn import functional

from flatout.observe.loss_graphs import _nodes, _pairs

ROWS = 8
NODES = ("MseLossBackward0", "SmoothL1LossBackward0", "SubBackward0")


def values():
    q = torch.randn(ROWS, 2, requires_grad=True) * 2
    return q.gather(1, torch.ones(ROWS, 1, dtype=torch.long))


def targets():
    return torch.rand(ROWS) + 0.9 * (torch.randn(ROWS, 2, requires_grad=True) * 2).max(1)[0]


@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize(
    ("loss", "is_mistake"),
    [
        (lambda: (values() - targets()).square().mean(), True),
        (lambda: functional.mse_loss(values(), targets()), True),
        (lambda: functional.smooth_l1_loss(values(), targets()), True),
        (lambda: functional.mse_loss(values(), targets()[:, None]), False),
        (lambda: functional.softplus(targets()[:, None] - targets()).mean(), False),
        (lambda: (targets()[:, None] - targets()[None]).square().mean(), False),
    ],
)
def test_pairs_are_a_mistake_where_none_was_shaped_for_them(loss, is_mistake):
    nodes = [(n, p) for n, p in _nodes(loss().grad_fn) if n.name() in NODES]
    found = [one for n, p in nodes for one in _pairs(torch, n, n.name(), p)]
    assert [one.detail for one in found] == is_mistake * [{"output": [ROWS, 1], "target": [ROWS]}]
