"""Tests that the doctor finds the same in a model and in the model within a wrapper."""

import pytest
import torch
from torch import nn

from flatout.devices.inventory import inventory
from flatout.doctor.judge import judge
from flatout.observe import Model, Observation
from flatout.observe.model_facts import unwrapped
from observed import observed

START = """
import copy, os, torch; torch.manual_seed(0)
from torch import nn
from torch.nn import functional
torch.distributed.init_process_group("gloo", init_method="file://" + os.path.abspath("ranks"),
    rank=0, world_size=1)
rows = torch.randn(32, 8)

def make():
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.Linear(16, 4))

def step(loss, optimizer):
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

def wrapped(model):
    return {wrapper}(model)
"""
WRAPPERS = ("nn.parallel.DistributedDataParallel", "")

STILL = """
online = make()
target = copy.deepcopy(online).eval()
online = wrapped(online)
optimizer = torch.optim.Adam(online.parameters(), lr=1e-3)
for number in range(24):
    states, later = torch.randn(32, 8), torch.randn(32, 8)
    with torch.no_grad():
        wanted = 0.9 * target(later).max(1).values
    step(functional.mse_loss(online(states).max(1).values, wanted), optimizer)
"""
COPIED = """
online = make()
copied = copy.deepcopy(online)
online = wrapped(online)
optimizer = torch.optim.Adam(online.parameters(), lr=1e-3)
for number in range(24):
    with torch.no_grad():
        targets = copied(rows)
    step((online(rows) - targets).square().mean(), optimizer)
"""
EVALUATED = """
model = make()
parallel = wrapped(model)
optimizer = torch.optim.Adam(parallel.parameters(), lr=1e-3)
for epoch in range(8):
    for number in range(4):
        step(parallel(rows).square().mean(), optimizer)
    model.eval()
    with torch.no_grad():
        for number in range(4):
            print(parallel(rows).mean().item())
    {after}
"""
FOLDS = """
from sklearn.model_selection import KFold
model = make()
for mine, others in KFold(4).split(rows):
    parallel = wrapped(model)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
    for number in range(6):
        step(parallel(rows[mine]).square().mean(), optimizer)
"""


def seen(folder, wrapper, source):
    return observed(folder, START.replace("{wrapper}", wrapper) + source)


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_target_network_that_never_moves(tmp_path, wrapper):
    (pair,) = seen(tmp_path, wrapper, STILL).still_targets
    assert pair.kind == "torch.nn.modules.container.Sequential"


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_copy_of_the_trained_model_is_no_teacher(tmp_path, wrapper):
    assert seen(tmp_path, wrapper, COPIED).teachers == []


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("is_right", [True, False])
def test_modes_are_read_from_the_wrapped_model(tmp_path, wrapper, is_right):
    after = "model.train()" if is_right else "pass"
    models = seen(tmp_path, wrapper, EVALUATED.replace("{after}", after)).models
    assert not any(model.evaluated_in_train_mode for model in models)
    assert any(model.trained_in_eval_mode for model in models) is not is_right


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_one_model_for_all_folds(tmp_path, wrapper):
    (found,) = seen(tmp_path, wrapper, FOLDS).shared_folds
    assert found.model == "Sequential"


def test_a_model_of_the_users_is_no_wrapper_though_it_holds_a_module():
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.module, self.head = nn.Linear(4, 4), nn.Linear(4, 2)

    own = Own()
    assert unwrapped(own) == [own]
    average = torch.optim.swa_utils.AveragedModel(own)
    assert unwrapped(average) == [average, average.module]
    assert unwrapped(nn.DataParallel(own))[-1] is own
    compiled = torch.compile(own, backend="eager")
    assert unwrapped(compiled)[-1] is own


ADDED_UP = """
model = wrapped(make())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for number in range(24):
    for batch in torch.utils.data.DataLoader(rows, batch_size=8, shuffle=True):
        functional.mse_loss(model(batch), torch.zeros(8, 4)).backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_undivided_sums_of_means_are_found_or_not_counted_as_checked(tmp_path, wrapper):
    verdict = judge([seen(tmp_path, wrapper, ADDED_UP)], inventory())
    name = "accumulation_undivided"
    assert name not in verdict.passed
    assert (name in [item.name for item in verdict.findings]) is not bool(wrapper)
    unknown = dict(verdict.unknown)
    assert (name in unknown) is bool(wrapper)
    assert not wrapper or "DistributedDataParallel changes gradients" in unknown[name]


HOOKED = {
    "batch_first_missing", "frozen_recomputed", "history_grows", "next_token_seen",
    "recurrent_by_step", "softmax_over_batch", "target_in_input", "target_never_moves",
    "teacher_in_train_mode", "views_equal",
}  # fmt: skip


def passed(seen):
    return {*judge([seen], inventory()).passed}


def test_checks_without_hooks_on_compiled_code_do_not_pass():
    seen = Observation(command=[], steps=24, models=[Model("Net")])
    counted = passed(seen)
    assert len(counted & HOOKED) == 8  # two more checks need the time of a step
    seen.compiles = [(24, 1, 0.5)]
    assert counted - passed(seen) == counted & HOOKED
