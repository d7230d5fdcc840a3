"""Zeroing gradients: timed in the first steps, and taken to go on as it was."""

import sys
import time

import pytest
import torch

from flatout.measure.timeline import LANES
from flatout.observe.lanes import FORWARD, OPTIMIZER
from flatout.observe.optimizers import StepFinder, watch_optimizers
from flatout.observe.watch import Watch

WINDOW = 50


@pytest.fixture
def watch():
    """A Watch that is hooked in; what it has put into torch is taken out again."""
    kept = [(owner, owner.zero_grad) for owner in (torch.optim.Optimizer, torch.nn.Module)]
    module = sys.modules["torch.optim.optimizer"]
    hooks = (module._global_optimizer_pre_hooks, module._global_optimizer_post_hooks)
    before = [dict(some) for some in hooks]
    watch = Watch()
    watch_optimizers(torch, watch, StepFinder(watch))
    yield watch
    for owner, plain in kept:
        owner.zero_grad = plain
    for some, known in zip(hooks, before, strict=True):
        for name in set(some) - set(known):
            del some[name]


def _steps(watch, optimizer, count):
    for _ in range(count):
        watch.lanes.switch(FORWARD)
        optimizer.zero_grad()
        optimizer.step()


def test_it_is_let_alone_after_the_first_steps_and_its_time_stays_the_optimizers(
    watch, monkeypatch
):
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], 0.1)
    plain = torch.optim.Optimizer.zero_grad.__wrapped__
    _steps(watch, optimizer, WINDOW - 1)
    assert torch.optim.Optimizer.zero_grad is not plain
    _steps(watch, optimizer, 1)
    assert torch.optim.Optimizer.zero_grad is plain
    call = next(call for call in watch.calls.all() if call.kind == "zero_grad")
    assert call.detail["watched_steps"] == WINDOW
    taken = call.seconds * 1e3 / WINDOW
    monkeypatch.setattr(torch.optim.Optimizer, "zero_grad", lambda *_: time.sleep(taken / 1e3))
    _steps(watch, optimizer, WINDOW)
    seen = watch.lanes.lanes_ms()
    assert seen.keys() == set(LANES)
    assert seen["optimizer"] >= taken


def test_a_later_wrapper_keeps_it(watch):
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], 0.1)
    hooked = torch.optim.Optimizer.zero_grad

    def others(*args, **kwargs):
        return hooked(*args, **kwargs)

    torch.optim.Optimizer.zero_grad = others
    _steps(watch, optimizer, 2 * WINDOW)
    assert torch.optim.Optimizer.zero_grad is others
    call = next(call for call in watch.calls.all() if call.kind == "zero_grad")
    assert call.detail["watched_steps"] == WINDOW
    watch.renew()
    assert torch.optim.Optimizer.zero_grad is others


def test_it_is_timed_again_after_a_restart(watch):
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], 0.1)
    _steps(watch, optimizer, WINDOW)
    plain = torch.optim.Optimizer.zero_grad
    watch.renew()
    assert torch.optim.Optimizer.zero_grad.__wrapped__ is plain
    _steps(watch, optimizer, WINDOW)
    assert torch.optim.Optimizer.zero_grad is plain


def test_what_is_not_seen_moves_no_more_than_there_is():
    lanes = Watch().lanes
    lanes.spent = [0] * 12
    lanes.shift(9_000_000, OPTIMIZER, FORWARD)
    lanes.shift(9_000_000, 0, OPTIMIZER)
    lanes.takes_each_step(4_000_000, FORWARD, OPTIMIZER)
    for _ in range(3):
        lanes.last = lanes.began
        lanes.lap(False)
    found = lanes.lanes_ms()
    assert (found["forward"], found["optimizer"]) == (0.0, 3.0)
