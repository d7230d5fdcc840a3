import collections
import copy
import random

import numpy as np
import pytest
import torch
from torch import nn

from flatout.errors import ModelError
from flatout.optim import Update, fuse
from flatout.train.snapshot import Moving, Snapshot, random_state, set_random_state, untouched

pytestmark = pytest.mark.usefixtures("one_thread")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4)
        self.drop, self.head = nn.Dropout(0.3), nn.Linear(4, 2)
        self.register_buffer("passing", torch.zeros(2), persistent=False)
        self.register_buffer("none", None)
        self.steps = 0
        self.mood = "calm"

    def forward(self, x):
        self.steps += 1
        self.passing = self.passing + random.random() + np.random.rand()
        if self.steps == 3:
            self.register_buffer("late", torch.ones(1))
        return self.head(self.drop(torch.relu(self.norm(self.conv(x)))).mean((2, 3)))


OPTIMIZERS = {
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01),
}


def job(name="adam"):
    torch.manual_seed(0)
    model = Net()
    return model, OPTIMIZERS[name](model.parameters())


def step(model, optimizer):
    model(torch.randn(4, 2, 6, 6)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def state_of(model, optimizer):
    """All that a step may change, in comparable form."""
    tensors = {n: t.detach().clone() for n, t in model.named_parameters()}
    tensors |= {f"buffer {n}": t.clone() for n, t in model.named_buffers()}
    tensors |= {
        f"grad {n}": p.grad.clone() for n, p in model.named_parameters() if p.grad is not None
    }
    for number, state in optimizer.state_dict()["state"].items():
        tensors |= {f"{number} {k}": torch.as_tensor(v).clone() for k, v in state.items()}
    plain = [optimizer.state_dict()["param_groups"], model.steps, model.mood]
    return tensors, [*plain, [m.training for m in model.modules()]], random_state()


def assert_same(ours, wanted):
    assert ours[0].keys() == wanted[0].keys()
    for name, value in wanted[0].items():
        assert torch.equal(ours[0][name], value), name
    assert ours[1] == wanted[1]
    assert torch.equal(ours[2]["torch"], wanted[2]["torch"])
    assert ours[2]["python"] == wanted[2]["python"]
    assert str(ours[2]["numpy"]) == str(wanted[2]["numpy"])


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("before", [0, 2])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_everything_comes_back_bit_for_bit(name, before, gradients):
    model, optimizer = job(name)
    for _ in range(before):
        step(model, optimizer)
    model.norm.eval()
    if gradients:
        model(torch.ones(1, 2, 6, 6)).sum().backward()
    wanted = state_of(model, optimizer)
    identities = [id(p) for p in model.parameters()]
    snapshot = Snapshot(model, optimizer)
    for _ in range(2):  # it can be restored more than once
        model.train()
        model.drop.eval()
        model.mood = "other"
        optimizer.param_groups[0]["lr"] = 9.0
        for _ in range(4):
            step(model, optimizer)
        snapshot.restore()
        assert_same(state_of(model, optimizer), wanted)
        assert [id(p) for p in model.parameters()] == identities


def test_training_goes_on_as_if_nothing_had_been():
    results = []
    for with_trial in (False, True):
        model, optimizer = job()
        update = Update(optimizer)
        torch.manual_seed(1)
        random.seed(1)
        np.random.seed(1)
        for number in range(5):
            if with_trial and number == 2:
                snapshot = Snapshot(model, optimizer)
                fuse(optimizer)
                for _ in range(3):
                    step(model, optimizer)
                snapshot.restore()
            model(torch.randn(4, 2, 6, 6)).square().mean().backward()
            update()
        results.append(state_of(model, optimizer))
    assert_same(*results)


@pytest.mark.parametrize("fused", [False, True])
def test_after_the_memory_format_changed(fused):
    results = []
    for with_change in (False, True):
        model, optimizer = job()
        step(model, optimizer)
        model(torch.ones(1, 2, 6, 6)).sum().backward()
        snapshot = Snapshot(model, optimizer)
        wanted = state_of(model, optimizer)
        step(model, optimizer)
        if with_change:
            model.to(memory_format=torch.channels_last)
        snapshot.restore()
        assert_same(state_of(model, optimizer), wanted)
        # Strides are those of now, for the gradient and the state as well.
        weight = model.conv.weight
        assert weight.is_contiguous() is not with_change
        for tensor in (weight.grad, optimizer.state[weight]["exp_avg"]):
            assert tensor.stride() == weight.stride()
        if fused:
            fuse(optimizer)
        model.to(memory_format=torch.contiguous_format)
        optimizer.zero_grad()
        x = torch.ones(1, 2, 6, 6)
        model.eval()(x).sum().backward()
        Update(optimizer)()
        results.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def fails_late(model):
    model(torch.randn(4, 2, 6, 6))
    model(torch.randn(4, 9, 6, 6))


def test_a_trial_forward_leaves_no_trace():
    model, optimizer = job()
    step(model, optimizer)
    wanted = state_of(model, optimizer)
    with untouched(model):
        model.eval()
        for _ in range(3):
            model(torch.randn(4, 2, 6, 6))
    assert_same(state_of(model, optimizer), wanted)
    with pytest.raises(RuntimeError, match="channels"), untouched(model):
        fails_late(model)
    assert_same(state_of(model, optimizer), wanted)


def test_only_on_error():
    model, optimizer = job()
    before = state_of(model, optimizer)
    with pytest.raises(RuntimeError, match="channels"), untouched(model, only_on_error=True):
        fails_late(model)
    assert_same(state_of(model, optimizer), before)
    with untouched(model, only_on_error=True):
        model(torch.randn(4, 2, 6, 6))
    assert model.steps == 1
    assert not torch.equal(model.norm.running_mean, before[0]["buffer norm.running_mean"])


def test_a_graph_that_is_open_does_not_notice():
    model, _ = job()
    loss = model(torch.randn(4, 2, 6, 6)).sum()
    with untouched(model):
        model(torch.randn(4, 2, 6, 6))
    loss.backward()


def test_random_states():
    state = random_state()
    first = (torch.rand(2), random.random(), np.random.rand())
    set_random_state(state)
    second = (torch.rand(2), random.random(), np.random.rand())
    assert torch.equal(first[0], second[0])
    assert first[1:] == second[1:]
    assert "cuda" not in state


def test_a_lazy_layer_with_buffers_is_refused():
    model = nn.Sequential(nn.Linear(2, 2), nn.LazyBatchNorm1d())
    with pytest.raises(ModelError, match="lazy layer") as caught, untouched(model):
        pass
    assert "call the model once" in caught.value.do
    with untouched(nn.Sequential(nn.LazyLinear(2))):
        pass


@pytest.mark.gpu
def test_random_states_of_a_gpu():
    torch.rand(1, device="cuda")
    state = random_state()
    first = torch.rand(2, device="cuda")
    set_random_state(state)
    assert torch.equal(torch.rand(2, device="cuda"), first)


def test_of_a_models_buffers_those_that_move_are_put_back():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))
            self.register_buffer("table", torch.zeros(5, 8192))

        def forward(self, x):
            self.calls += 1
            return x + self.table.sum(1)

    model = Counting()
    moving = Moving(model, draws=False)
    for done in range(3):
        moving.keep()
        model(torch.zeros(5))
        moving.put_back()
        assert model.calls == done
        moving.keep()
        model(torch.zeros(5))
    moving.keep()
    assert [tensor is model.calls for tensor, _ in moving._kept] == [True]


def test_what_batch_norm_changes_is_put_back():
    """It writes its statistics without counting a version."""
    model = nn.BatchNorm1d(4)
    moving = Moving(model, draws=False)
    for _ in range(3):
        moving.keep()
        model(torch.randn(8, 4))
    moving.keep()
    before = copy.deepcopy(model.state_dict())
    model(torch.randn(8, 4))
    moving.put_back()
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


class Keeps(nn.Module):
    """A cell whose state, and all else that it keeps, lies in plain attributes."""

    def __init__(self):
        super().__init__()
        self.cell = nn.GRUCell(3, 3)
        self.state, self.counts, self.seen = None, torch.zeros(2), [1]
        self.by_size, self.sizes, self.latest = {}, set(), collections.deque([0], maxlen=2)
        self.wide = torch.zeros(1, 3).expand(4, 3)

    def forward(self, x):
        if not hasattr(self, "first"):
            self.first, self.pair = torch.zeros(len(x), 3), (x, x)
        state = self.first if self.state is None else self.state
        self.state = self.cell(x, state).detach()
        self.counts += 1
        self.seen.append(len(x))
        self.by_size[len(x)] = x
        self.sizes.add(len(x))
        self.latest.append(len(x))
        return self.state


def test_what_a_forward_keeps_in_attributes_is_put_back():
    """A state of few samples would not fit the next batch."""
    model = Keeps()
    for _ in range(2):
        with untouched(model):
            model(torch.ones(4, 3))
            model(torch.ones(4, 3))
        assert model.state is None
        assert not hasattr(model, "first")
        assert not hasattr(model, "pair")
        assert model.counts.tolist() == [0, 0]
        assert model.seen == [1]
        assert (model.by_size, model.sizes, [*model.latest]) == ({}, set(), [0])
    model(torch.ones(2, 3))
    kept, first = model.state, model.first
    with untouched(model):
        model(torch.ones(2, 3))
    assert model.state is kept
    assert model.first is first
    assert model.seen == [1, 2]
