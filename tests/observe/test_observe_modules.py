"""Which modules forward and backward take their time in."""

from threading import get_ident
from time import sleep

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from flatout.observe.backward import watch_backward
from flatout.observe.lanes import FORWARD
from flatout.observe.models import SeenModel
from flatout.observe.module_times import ModuleTimes
from flatout.observe.observation import Observation
from flatout.observe.optimizers import StepFinder
from flatout.observe.watch import Watch

WAIT_S = 0.015


class Slow(torch.autograd.Function):
    """Waits in forward and twice as long in backward."""

    @staticmethod
    def forward(ctx, x):
        sleep(WAIT_S)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        sleep(2 * WAIT_S)
        return gradient


class Waits(nn.Linear):
    def forward(self, x):
        return Slow.apply(super().forward(x))


class Net(nn.Module):
    def __init__(self, is_checkpointed=False):
        super().__init__()
        self.layers = nn.ModuleList([Waits(4, 4), Waits(4, 4)])
        self.head = nn.Linear(4, 4)
        self.is_checkpointed = is_checkpointed

    def forward(self, x):
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.is_checkpointed else layer(x)
        return self.head(Slow.apply(x))


@pytest.fixture
def watched(monkeypatch):
    """Trains a model for four steps under watch, and gives its modules."""
    plain = torch.autograd.backward

    def train(model, loss_of=lambda told: told.sum(), keeps=False):
        watch = Watch()
        watch.lanes.thread = get_ident()
        monkeypatch.setattr(torch.autograd, "backward", plain)
        watch_backward(torch, watch, StepFinder(watch))
        times = ModuleTimes(torch, watch)
        watch.models.append(SeenModel(model))
        watch.models[0].is_stepped = True
        x = torch.ones(2, 4)
        for _ in range(4):
            watch.lanes.switch(FORWARD)
            loss_of(model(x)).backward(retain_graph=keeps)
            watch.lanes.leave_step()
            watch.attend()
        seen = Observation(["train.py"], steps=4, lanes_ms=watch.lanes.lanes_ms())
        return times, {(one.name, one.kind): one for one in times.results(seen)}, seen.lanes_ms

    return train


@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_time_goes_to_the_module_that_takes_it(watched, is_checkpointed):
    _, found, lanes_ms = watched(Net(is_checkpointed))
    layers, net, head = found["layers.*", "Waits"], found["", "Net"], found["head", "Linear"]
    assert layers.count == 2
    assert layers.forward_ms == pytest.approx(2 / 3 * lanes_ms["forward"], rel=0.3)
    # A part that is checkpointed is computed again there.
    share = 6 / 8 if is_checkpointed else 4 / 6
    assert layers.backward_ms == pytest.approx(share * lanes_ms["backward"], rel=0.3)
    assert layers.backward_ms + net.backward_ms < 1.001 * lanes_ms["backward"]
    assert net.backward_ms > 10 * head.backward_ms
    assert (layers.operator, net.operator, head.operator) == ("Slow", "Slow", "")
    assert layers.words == "layers.* (2 Waits)"


def test_what_lies_in_no_module_is_told_apart(watched):
    times, found, lanes_ms = watched(
        nn.Sequential(nn.Linear(4, 4)), lambda told: Slow.apply(told).sum()
    )
    outside = found["", ""]
    assert outside.backward_ms > 10 * found["0", "Linear"].backward_ms
    assert (outside.words, outside.operator) == ("outside of the model's modules", "Slow")
    seen = Observation(["train.py"], steps=4, lanes_ms=lanes_ms)
    linear, whole = found["0", "Linear"], found["", "Sequential"]
    assert times.ms_of(["0"], seen) == linear.forward_ms + linear.backward_ms
    assert times.ms_of([""], seen) == whole.forward_ms + whole.backward_ms
    assert times.ms_of(["1"], seen) is None


def test_no_hook_stays_behind(watched):
    model = Net()
    kept = []
    times, _, _ = watched(model, lambda told: (kept.append(told.sum()), kept[-1])[1], keeps=True)
    assert not any(inner._forward_hooks or inner._forward_pre_hooks for inner in model.modules())
    kept[2].backward()
    assert times._ran == []
