"""Steps that a script leaves out because their loss is no number."""

from math import inf, isfinite, nan
from threading import get_ident

import pytest
import torch

from flatout.observe.clipping import NO_STEP, Clipping
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
    (fact,) = seen.lines
    assert (fact.count, fact.detail, fact.site.file) == (3, {"of": 6}, __file__)


def test_a_loss_that_is_stepped_on_all_the_same_is_not_skipped(skipped):
    lanes, seen = skipped
    for loss in (ONE, NAN, ONE):
        assert not torch.isfinite(loss) or loss.item() == 1.0
        lanes.backwards += 1
    assert seen.lines == []


def test_it_is_not_watched_any_more_where_it_is_asked_of_much_else(skipped):
    _, seen = skipped
    for _ in range(100):
        torch.isnan(ONE)
    seen._weigh()
    assert not hasattr(torch.isnan, "_flatout_stack")


class Model:
    calls = 0


@pytest.fixture
def reading(skipped):
    """Reads losses as `loss.item()` tells them, each after a call of the model."""
    lanes, seen = skipped
    model = Model()
    seen._watch.models.append(model)

    def read(number):
        for look in seen._watch.on_number:
            look(number)

    def losses(*numbers):
        for number in numbers:
            model.calls += 1
            yield number, read

    return lanes, seen, losses


def test_steps_left_out_for_a_number_that_was_read_are_counted(reading):
    lanes, seen, losses = reading
    for number, read in losses(1.0, inf, 1.0, nan, nan, 1.0, nan):
        read(number)
        if isfinite(number):
            lanes.backwards += 1
            lanes.steps += 1
    (fact,) = seen.lines
    assert (fact.count, fact.site.file) == (3, __file__)  # of the last one no one knows


def test_a_number_that_is_none_and_read_for_another_reason_is_not_skipped(reading):
    lanes, seen, losses = reading
    for number, read in losses(nan, nan, nan):
        read(number)
        lanes.backwards += 1  # trained on all the same
    lanes.steps, lanes.backwards = lanes.steps + 1, 0
    for number, read in losses(nan):
        for _ in range(3):  # parts of one loss
            read(number)
        lanes.steps += 1
    with torch.no_grad():
        for number, read in losses(nan, nan):
            read(number)
    lanes.is_open = True
    for number, read in losses(nan, nan):
        read(number)
    assert seen.lines == []


def test_a_loss_that_differs_from_itself_is_asked(skipped):
    lanes, seen = skipped
    for loss in (ONE, NAN, ONE):
        if loss != loss:
            continue
        lanes.steps += 1
    (fact,) = seen.lines
    assert (fact.count, fact.detail) == (1, {"of": 3})


def test_tensors_are_asked_no_more_where_all_is_well(skipped):
    lanes, seen = skipped
    train(lanes, [ONE, NAN, ONE])
    seen._settle()
    assert hasattr(torch.isnan, "_flatout_stack")
    seen._renew()
    seen._open()
    seen._settle()
    assert not hasattr(torch.isnan, "_flatout_stack")


@pytest.mark.parametrize("is_good", [False, True])
def test_a_scaler_that_leaves_out_all_steps_is_told(is_good):
    watch = Watch()
    clipping = Clipping(torch, watch)
    scaler, model = torch.amp.GradScaler("cpu"), torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    try:
        for _ in range(24):
            assert not watch.notes
            loss = model(torch.ones(3, 2)).sum()
            scaler.scale(loss if is_good else loss * torch.nan).backward()
            scaler.step(optimizer)
            watch.lanes.steps += is_good
            scaler.update()
            optimizer.zero_grad()
    finally:
        clipping._end()
    assert (NO_STEP in watch.notes) is not is_good
