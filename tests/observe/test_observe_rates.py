"""The learning rate that an optimizer stepped with, and where it was made."""

import pytest
import torch
from torch import nn

from flatout.observe.optimizers import SeenOptimizer, facts_of


def test_a_rate_is_that_of_the_step_before_the_scheduler_goes_on():
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.4)
    seen = SeenOptimizer(optimizer, facts_of(optimizer, None))
    seen.counts = {1: 1}
    seen.look_at_rate()
    assert (seen.facts.rates, seen.facts.first_target) == ([(1, 0.4)], None)
    warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, 0.25, total_iters=2)
    seen.counts = {1: 5}
    seen.look_at_rate()
    assert (seen.facts.rates[1], seen.facts.first_target) == ((5, 0.1), 0.4)
    optimizer.step()
    warm_up.step()
    seen.counts = {1: 4, 2: 2}
    seen.look_at_rate()
    assert seen.facts.rates[2] == (6, 0.25)
    del optimizer, warm_up
    seen.look_at_rate()
    assert len(seen.facts.rates) == 3


@pytest.mark.parametrize(("is_sparse", "share"), [(False, 0.02), (True, 1.0)])
def test_steps_go_through_all_rows_of_a_table_but_with_sparse_gradients(is_sparse, share):
    table = torch.nn.Embedding(100, 4, sparse=is_sparse)
    optimizer = torch.optim.SGD(table.parameters(), 0.1)
    seen = SeenOptimizer(optimizer, facts_of(optimizer, None))
    table(torch.tensor([3, 7, 7])).sum().backward()
    seen.look_at_tables([table.weight])
    assert seen.facts.sparse_share == share


def test_options_of_keras_are_read_and_functions_of_the_scripts_are_not_called():
    keras = pytest.importorskip("keras")

    asked, rates = [], keras.optimizers.schedules
    decay = keras.optimizers.SGD(rates.CosineDecay(200.0, 100), momentum=0.9)
    own = keras.optimizers.AdamW(lambda: asked.append(1) or 0.1)
    for optimizer, options in (
        (keras.optimizers.Adam(3.0), {"lr": 3.0, "beta1": 0.9, "beta2": 0.999}),
        (decay, {"lr": 200.0, "momentum": 0.9}),
        (own, {"weight_decay": 0.004, "beta1": 0.9, "beta2": 0.999}),
    ):
        optimizer.build([keras.Variable([1.0])])
        seen = SeenOptimizer(optimizer, facts_of(optimizer, None))
        asked.clear()
        seen.look_at_rate()
        assert seen.facts.options == pytest.approx(options)
        assert not asked
