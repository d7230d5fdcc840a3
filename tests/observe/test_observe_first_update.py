"""By how much of its own size the first step changes a matrix."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from flatout.observe.first_update import FirstUpdate
from flatout.observe.observation import Optimizer
from flatout.observe.watch import Watch


def first_change(model, rate, idle=0):
    """Of an optimizer that steps once so many steps of others are over."""
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    facts = Optimizer("torch.optim.adam.Adam")
    watch = Watch()
    watch.models.append(SimpleNamespace(ref=lambda: model))
    watch.optimizers.append(SimpleNamespace(facts=facts, tensors=model.parameters, steps=1))
    update = FirstUpdate(watch)
    model(torch.randn(8, 64)).square().mean().backward()
    update._keep()
    for step in range(1, idle + 2):
        if step > idle:
            optimizer.step()
        watch.lanes.steps = step
        update._look()
    return facts.first_change


@pytest.mark.parametrize("idle", [0, 5])
def test_it_is_told_in_terms_of_what_the_matrices_were(idle):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Linear(64, 8))
    # Adam's first step is the rate, and such weights are uniform up to 1/8.
    many, change = first_change(model, 0.3, idle)
    assert many == 3
    assert change == pytest.approx(0.3 / (0.125 / 3**0.5), rel=0.1)


def test_what_begins_at_zero_says_nothing():
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 8))
    nn.init.zeros_(model[1].weight)
    assert first_change(model, 0.3) is None
