"""A script that trains a second model: its mistakes there are seen as those of the first are."""

from types import SimpleNamespace

import pytest

from flatout.observe.quick import AFTER_STEPS
from flatout.observe.watch import Watch
from observed import observed

FIRST = """
import torch; torch.manual_seed(0)
from torch import nn
rows, classes = torch.randn(32, 8), torch.randint(0, 4, (32,))

def layers():
    inner = [nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh()]
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), *inner, nn.Linear(16, 4))

def train(model, optimizer, steps):
    for step in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(rows + 0.01 * step), classes).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

first = layers()
before = torch.optim.Adam(first.parameters(), lr=1e-3)
train(first, before, 30)
"""

MISTAKEN = """
second = layers()
optimizer = torch.optim.Adam(second[:6].parameters(), lr=0.5)
kept = []
for step in range(25):
    loss = nn.functional.cross_entropy(second(rows + 0.01 * step).softmax(1), classes)
    loss.backward()
    optimizer.step()
    nn.utils.clip_grad_norm_(second.parameters(), 1.0)
    kept.append(loss)
"""

RIGHT = """
nn.functional.cross_entropy(first(rows), classes).backward()  # a gradient that stays
second = nn.Sequential(first[:6], nn.Linear(16, 4))
optimizer = torch.optim.Adam(second.parameters(), lr=1e-3)
train(second, optimizer, 30)
third = layers()
train(third, torch.optim.Adam(third.parameters(), lr=1e-3), 30)
"""


@pytest.mark.slow
def test_mistakes_of_a_second_training_alone_are_seen(tmp_path):
    seen = observed(tmp_path, FIRST + MISTAKEN)
    before, optimizer = seen.optimizers
    assert before.kept_gradients == (0, 2)
    assert optimizer.kept_gradients == (2, 2)
    assert before.first_change[1] < 0.1 < optimizer.first_change[1]
    (first, second) = seen.models
    assert not first.not_stepped
    assert second.not_stepped == ["6.weight", "6.bias"]
    clips = {call.site.line: call.detail["is_late"] for call in seen.calls if call.kind == "clip"}
    assert sorted(clips.values()) == [False, True]
    (twice,) = [item for item in seen.in_losses if item.kind == "twice"]
    assert twice.detail["inner"] == "softmax"
    assert twice.site.code.startswith("loss = nn.functional.cross_entropy(second(")
    (kept,) = seen.kept_graphs
    assert kept.name == "kept"


@pytest.mark.slow
def test_nothing_is_wrong_where_a_later_training_is_right(tmp_path):
    seen = observed(tmp_path, FIRST + RIGHT)
    assert [item.kept_gradients for item in seen.optimizers] == [(0, 2)] * 3
    assert not any(model.not_stepped for model in seen.models)
    assert not any(item.unreached or item.orphans for item in seen.optimizers)
    assert not [call for call in seen.calls if call.kind == "clip" and call.detail["is_late"]]
    assert not [item for item in seen.in_losses if item.kind != "labels"]


def test_a_training_has_its_looks_whose_cost_ends_with_its_first_steps():
    watch, looked = Watch(), []
    watch.at_each(2, lambda: looked.append(watch.lanes.steps))
    watch.optimizers.append(SimpleNamespace(steps=30))
    watch.lanes.steps = 30
    watch.attend()
    watch.training_begins()
    assert not watch.quick.is_on
    assert watch.stepping() == []
    watch.optimizers[0].steps += 1
    assert watch.stepping() == watch.optimizers
    for steps in range(31, 60):
        watch.lanes.steps = steps
        if steps >= watch.lanes.due:
            watch.attend()
        assert watch.quick.is_on == (steps >= 30 + AFTER_STEPS)
    assert looked == [30, 32]
    assert watch.looking_ns == 0


def test_few_of_many_trainings_are_looked_at():
    watch, began = Watch(), []
    watch.on_training.append(lambda: began.append(watch.lanes.steps))
    for steps in range(1, 100):  # as where each step has an optimizer of its own
        watch.lanes.steps = steps
        watch.training_begins()
    assert began == [4, 8, 12, 16]
