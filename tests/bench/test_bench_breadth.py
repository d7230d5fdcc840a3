"""The families of models of bench/breadth.py."""

import pytest
import torch
from breadth_models import FAMILIES


@pytest.mark.parametrize("name", FAMILIES)
def test_a_step_reaches_every_parameter(name):
    family = FAMILIES[name]
    torch.manual_seed(0)
    model, inputs = family.model(), family.inputs(8)
    output = model(**inputs) if isinstance(inputs, dict) else model(inputs)
    loss = family.loss(output, family.targets(inputs))
    loss.backward()
    assert loss.isfinite()
    assert all(p.grad is not None for p in model.parameters())
