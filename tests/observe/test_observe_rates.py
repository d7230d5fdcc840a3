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
