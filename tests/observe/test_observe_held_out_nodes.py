"""Losses over all nodes of a graph, and over those that are trained on."""

import pytest

from observed import observed

START = """
import numpy as np, torch; torch.manual_seed(0)
from torch import nn
from types import SimpleNamespace

x, y = torch.randn(60, 8), torch.arange(60) % 3

def first(many, begin=0):
    mask = torch.zeros(60, dtype=torch.bool)
    mask[begin:begin + many] = True
    return mask

def train(loss_of, **options):
    model = nn.Linear(8, 3)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for step in range(6):
        optimizer.zero_grad()
        loss_of(model(x)).backward()  # here
        optimizer.step()

loss = nn.functional.cross_entropy
"""
MASKS = "train_mask, test_mask = first(20), first(30, 30)\n"
WRONG = {
    "masks": (MASKS + "train(lambda out: loss(out, y))", "test_mask", 30),
    "attributes of a graph": (
        "data = SimpleNamespace(train_mask=first(20), val_mask=first(10, 20), "
        "test_mask=first(30, 30))\ntrain(lambda out: loss(out, y))",
        "data.test_mask",
        30,
    ),
    "numbers": (
        "idx_train, idx_test = torch.arange(20), torch.arange(40, 60)\n"
        "train(lambda out: nn.functional.nll_loss(out.log_softmax(1), y))",
        "idx_test",
        20,
    ),
    "numbers of numpy": (
        "train_idx, val_idx = np.arange(20), np.arange(40, 60)\ntrain(lambda out: loss(out, y))",
        "val_idx",
        20,
    ),
    "a part is ignored": (
        f"{MASKS}known = torch.where(first(40), y, -100)\ntrain(lambda out: loss(out, known))",
        "test_mask",
        10,
    ),
}
RIGHT = {
    "masked": MASKS + "train(lambda out: loss(out[train_mask], y[train_mask]))",
    "ignored": f"{MASKS}known = torch.where(train_mask, y, -100)\n"
    "train(lambda out: loss(out, known))",
    "weighted": f"{MASKS}train(lambda out: (loss(out, y, reduction='none') * train_mask).sum())",
    "no training mask": "test_mask = first(30)\ntrain(lambda out: loss(out, y))",
    "rows of another table": "train_idx, test_idx = torch.arange(20), torch.arange(100, 120)\n"
    "train(lambda out: loss(out, y))",
    "no classes": MASKS + "train(lambda out: out.square().mean())",
}


def nodes_in(source, folder):
    return observed(folder, START + source + "\n").held_out_nodes


@pytest.mark.parametrize("case", WRONG)
def test_a_loss_over_nodes_of_the_test_is_told(tmp_path, case):
    source, name, in_loss = WRONG[case]
    (found,) = nodes_in(source, tmp_path)
    assert (found.name, found.in_loss, found.nodes) == (name, in_loss, 60)
    assert found.site.code.endswith("# here")


@pytest.mark.parametrize("case", RIGHT)
def test_a_loss_over_nodes_of_the_training_is_left_alone(tmp_path, case):
    assert nodes_in(RIGHT[case], tmp_path) == []
