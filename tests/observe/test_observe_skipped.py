"""Steps that a script leaves out because their loss is no number."""

from threading import get_ident

import pytest
import torch

from flatout.observe.skipped import SkippedSteps
from flatout.observe.watch import Watch

NAN, ONE = torch.tensor(torch.nan), torch.tensor(1.0)


@pytest.fixture
def skipped():
    watch = Watch()
    watch.lanes.thread, watch.lanes.steps = get_ident(), 5
    skipped = SkippedSteps(torch, watch)
    skipped._open()
    yield watch.lanes, skipped
    skipped._end()


def train(lanes, losses):
    for loss in losses:
        if torch.isnan(loss):
            continue
        lanes.steps += 1


def test_steps_without_a_loss_are_counted(skipped):
    lanes, seen = skipped
    train(lanes, [ONE, NAN, ONE, NAN, NAN, ONE])
    (fact,) = seen.found
    assert (fact.count, fact.detail, fact.site.file) == (3, {"of": 6}, __file__)


def test_a_loss_that_is_stepped_on_all_the_same_is_not_skipped(skipped):
    lanes, seen = skipped
    for loss in (ONE, NAN, ONE):
        assert not torch.isfinite(loss) or loss.item() == 1.0
        lanes.backwards += 1
    assert seen.found == []


def test_it_is_not_watched_any_more_where_it_is_asked_of_much_else(skipped):
    _, seen = skipped
    for _ in range(100):
        torch.isnan(ONE)
    seen._weigh()
    assert not hasattr(torch.isnan, "_flatout_stack")
