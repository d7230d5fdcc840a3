"""What a look at a batch changes outside of weights is put back, wherever a user keeps it."""

import collections
import dataclasses
import functools
import random
import threading

import numpy as np
import pytest
import torch
from torch import nn

from flatout import Trainer
from flatout.train.held_state import HeldState
from flatout.train.snapshot import Snapshot, untouched

CALLS = 0
SIZES = []


def of_a_global(x):
    global CALLS
    CALLS += 1
    SIZES.append(len(x))
    return CALLS, [*SIZES]


def of_an_attribute(x):
    of_an_attribute.calls = getattr(of_an_attribute, "calls", 0) + 1
    return of_an_attribute.calls


def of_a_default(x, seen=[]):  # noqa: B006
    seen.append(len(x))
    return [*seen]


def of_a_cell():
    calls, latest = 0, None

    def call(x):
        nonlocal calls, latest
        calls += 1
        before, latest = latest, x
        return calls, before

    return call


class Counts:
    """Keeps numbers, containers, an array, a tensor, a generator, and what comes later."""

    made = 0

    def __init__(self):
        self.calls, self.by_size = 0, collections.Counter()
        self.latest, self.groups = collections.deque(maxlen=2), collections.defaultdict(list)
        self.sums, self.mean = np.zeros(3), torch.zeros(2)
        self.draws = [random.Random(0), np.random.default_rng(0), np.random.RandomState(0)]
        self.torch_draws = torch.Generator().manual_seed(0)

    def __call__(self, x):
        type(self).made += 1
        self.calls += 1
        self.by_size[len(x)] += 1
        self.latest.append(len(x))
        self.groups[len(x)].append(self.calls)
        self.sums += 1
        self.mean.mul_(0.5).add_(1)
        if not hasattr(self, "first"):
            self.first = {"size": len(x)}
        self.first["again"] = self.calls
        drawn = [self.draws[0].random(), self.draws[1].random(), self.draws[2].rand()]
        drawn.append(float(torch.rand(1, generator=self.torch_draws)))
        kept = (dict(self.by_size), [*self.latest], {k: [*v] for k, v in self.groups.items()})
        return (type(self).made, self.calls, kept, self.sums.tolist(), self.mean.tolist(), drawn)


class Slots:
    __slots__ = ("calls", "later")

    def __init__(self):
        self.calls = 0

    def step(self, x):
        self.calls += 1
        fresh = not hasattr(self, "later")
        self.later = len(x)
        return self.calls, fresh


@dataclasses.dataclass(frozen=True)
class Frozen:
    inner: Counts
    names: tuple

    def __call__(self, x):
        return self.inner(x), self.names[0](x)


def of_a_hook():
    model, seen = nn.Linear(1, 1), []
    model.register_forward_hook(lambda module, inputs, output: seen.append(len(inputs[0])))

    def call(x):
        model(torch.zeros(2, 1))
        return [*seen]

    return call


HELD = {
    "a global": lambda: of_a_global,
    "an attribute of a function": lambda: of_an_attribute,
    "a default": lambda: of_a_default,
    "a cell": of_a_cell,
    "an object": Counts,
    "a method": lambda: Slots().step,
    "a frozen dataclass": lambda: Frozen(Counts(), (of_a_cell(),)),
    "a partial": lambda: functools.partial(lambda held, x: held(x), Counts()),
    "a dict of objects": lambda: {"a": [Counts()]}["a"][0],
    "a hook": of_a_hook,
}


@pytest.mark.parametrize("name", HELD)
def test_it_is_put_back_wherever_it_is_kept(name):
    call, x = HELD[name](), "abc"
    call(x)
    state = HeldState(call)
    first = [call(x) for _ in range(3)]
    for _ in range(2):  # it can be restored more than once
        state.restore()
        assert [call(x) for _ in range(3)] == first


def test_what_is_a_librarys_or_another_threads_is_left_alone():
    class Queue:
        def __init__(self):
            self.lock, self.items = threading.Lock(), [1]

    class Optimizer(torch.optim.SGD):
        pass

    optimizer = Optimizer([nn.Parameter(torch.zeros(1))], lr=1.0)
    queue = Queue()
    state = HeldState([queue, optimizer, torch, np.float32])
    queue.items.append(2)
    optimizer.param_groups[0]["lr"] = 2.0
    state.restore()
    assert queue.items == [1, 2]
    assert optimizer.param_groups[0]["lr"] == 2.0


def test_a_large_container_is_not_copied():
    held = {"words": [str(n) for n in range(200_000)]}
    state = HeldState(held)
    held["words"].append("one more")
    held["more"] = 1
    state.restore()
    assert [*held] == ["words"]
    assert len(held["words"]) == 200_001


class Loss:
    """Weighs by how often it was called, as a warm-up of a loss does."""

    def __init__(self):
        self.calls, self.ema = 0, torch.zeros(())

    def __call__(self, output, target):
        self.calls += 1
        error = (output - target).square().mean()
        self.ema.lerp_(error.detach(), 0.1)
        return error * min(1.0, self.calls / 20) / (1 + self.ema)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.passes = nn.Linear(6, 16), nn.Linear(16, 1), []

    def forward(self, x):
        self.passes.append(len(x))
        return self.b(torch.relu(self.a(x))) * (1 + 0.01 * len(self.passes))


def _plain(x, y, epochs, batch):
    torch.manual_seed(0)
    model, loss = Net(), Loss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(epochs):
        for start in range(0, len(x), batch):
            optimizer.zero_grad()
            loss(model(x[start : start + batch]), y[start : start + batch]).backward()
            optimizer.step()
    return model, loss


def test_exact_training_is_bitwise_with_a_loss_that_counts_its_calls(tmp_path, monkeypatch):
    monkeypatch.setenv("FLATOUT_CACHE", str(tmp_path))
    torch.manual_seed(1)
    x, y = torch.randn(128, 6), torch.randn(128, 1)
    wanted, of_plain = _plain(x, y, 3, 16)
    torch.manual_seed(0)
    model, loss = Net(), Loss()
    trainer = Trainer(
        model,
        loss=loss,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.05),
        allow="exact",
    )
    trainer.fit(x, y, epochs=3, batch_size=16, shuffle=False)
    assert loss.calls == of_plain.calls == 24
    assert torch.equal(loss.ema, of_plain.ema)
    assert model.passes == wanted.passes
    for ours, theirs in zip(model.parameters(), wanted.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_a_snapshot_and_a_look_keep_what_compute_holds():
    model, loss = Net(), Loss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def compute(x):
        return loss(model(x), x[:, :1])

    snapshot = Snapshot(model, optimizer, compute)
    with untouched(model, compute):
        compute(torch.randn(4, 6))
    assert (loss.calls, model.passes) == (0, [])
    compute(torch.randn(4, 6)).backward()
    optimizer.step()
    snapshot.restore()
    assert (loss.calls, model.passes, float(loss.ema)) == (0, [], 0.0)
