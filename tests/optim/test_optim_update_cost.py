"""What an update takes is told without making one."""

import copy
import itertools

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from flatout import optim
from flatout.models import KerasOptimizer
from flatout.optim import seconds_of_update, update_cost


def told(optimizer, by_rows=(), **options):
    """With a clock on which an update takes a second."""
    return seconds_of_update(optimizer, by_rows, itertools.count(0.0).__next__, **options)


def network():
    return nn.Sequential(nn.Embedding(50, 4), nn.Flatten(), nn.Linear(12, 3))


@pytest.mark.parametrize(
    "make",
    [
        torch.optim.Adam,
        lambda p: torch.optim.AdamW(p, fused=True),
        lambda p: torch.optim.Adam(p, amsgrad=True, lr=torch.tensor(1e-3)),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
        torch.optim.Adagrad,
        torch.optim.RMSprop,
        torch.optim.Adafactor,
        optim.Lamb,
        lambda p: optim.Lars(p, lr=0.1),
        optim.LazyAdam,
    ],
)
def test_neither_weights_nor_the_optimizer_are_touched(make):
    torch.manual_seed(0)
    model = network()
    optimizer = make(model.parameters())
    optimizer.register_step_pre_hook(lambda *given: pytest.fail("it was stepped"))
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict(), torch.get_rng_state()))
    assert told(optimizer) == 1.0
    assert all(p.grad is None for p in model.parameters())
    for a, b in zip(before[0].values(), model.state_dict().values(), strict=True):
        assert torch.equal(a, b)
    assert str(optimizer.state_dict()) == str(before[1])
    assert torch.equal(torch.get_rng_state(), before[2])


def test_the_time_of_many_values_is_scaled_up_from_few():
    model = nn.Sequential(nn.Embedding(10_000, 4), nn.Linear(4, 1))
    optimizer = torch.optim.Adam(model.parameters())
    assert told(optimizer, most=1_000) == pytest.approx(40_005 / 1_000, rel=0.02)


def test_only_what_the_optimizer_steps_whole_counts(monkeypatch):
    stepped = []
    second = update_cost._second

    def spied(optimizer, parameters):
        stepped.append([len(p) for own in parameters for p in own])
        return second(optimizer, parameters)

    monkeypatch.setattr(update_cost, "_second", spied)
    model = network()
    optimizer = torch.optim.Adam(model.parameters())
    assert told(optimizer) == told(optimizer, [model[0].weight]) == 1.0
    model[2].weight.requires_grad_(False)
    assert told(optimizer) == 1.0
    assert stepped == [[50, 3, 3], [3, 3], [50, 3]]
    assert told(optimizer, model.parameters()) == 0.0


class Wrapper(torch.optim.SGD):
    """As those that step another optimizer."""

    def step(self, closure=None):
        pytest.fail("it was stepped")


def test_of_what_may_step_something_else_the_least_is_told():
    model = network()
    wrapper = Wrapper(model.parameters(), lr=0.1)
    assert told(wrapper) == 1.0
    assert not wrapper.state


@pytest.mark.parametrize("rate", [torch.tensor(1e-2), lambda: 1e-2])
@pytest.mark.filterwarnings("error")
def test_a_keras_optimizer_is_left_as_it_is(rate):
    keras = pytest.importorskip("keras")
    weights = [keras.Variable(torch.ones(50, 4)), keras.Variable(torch.ones(3))]
    given = keras.optimizers.AdamW(1e-2, clipnorm=1.0, use_ema=True)
    optimizer = KerasOptimizer(given, weights)
    given._learning_rate = rate
    before = [str(variable.value) for variable in (*weights, *given.variables)]
    assert told(optimizer) == 1.0
    assert [str(variable.value) for variable in (*weights, *given.variables)] == before
    assert all(weight.value.grad is None for weight in weights)


def test_it_is_not_known_where_there_is_no_such_step():
    model = network()
    assert told(torch.optim.SparseAdam(model[0].parameters())) == 0.0
    optimizer = torch.optim.Adam(model.parameters())
    handle = register_optimizer_step_pre_hook(lambda *given: pytest.fail("it was stepped"))
    try:
        assert told(optimizer) == 0.0
    finally:
        handle.remove()
    assert told(optimizer) == 1.0
