"""The families of models of bench/breadth.py."""

from argparse import Namespace

import pytest
import torch
from breadth_models import FAMILIES

import breadth


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


def row_of(vs_hand, vs_plain, **other):
    row = {"vs_hand": vs_hand, "vs_plain": vs_plain, "steady_vs_hand": 2.0, "steady_vs_plain": 3.0}
    row |= {
        "lost_share": 0.01,
        "all_lost_share": 0.05,
        "before_s": 0.5,
        "steps": 100,
        "plain_s": 0.3,
        "fit_s": 60.0,
    }
    return {**row, "family": "mlp", **other}


def test_whole_runs_are_judged_and_steady_steps_only_shown():
    longer = row_of(1.1, 1.6, lost_share=0.03)
    rows = [row_of(0.9, 1.2, lost_share=0.04, fit_s=8.0), longer, row_of(1.2, 1.8)]
    found = {key.name: key for key in breadth.keys(rows, Namespace(seconds=30, losses=0))}
    assert found["default_vs_best_by_hand"].value == 1.1
    assert found["default_vs_best_worst"].value == 0.9
    assert found["default_vs_best_worst"].met is False
    assert found["default_vs_plain"].value == 1.6
    assert found["steady_vs_best_by_hand"].value == 2.0
    assert found["steady_vs_best_by_hand"].met is None
    assert found["tuning_share"].value == 0.03
    assert found["tuning_share"].met is False


def test_tuning_may_take_a_smaller_share_of_a_longer_run():
    shares = [breadth.most_tuning(seconds) for seconds in (1, 10, 35, 60, 600)]
    assert shares == pytest.approx([0.05, 0.05, 0.035, 0.02, 0.02])
