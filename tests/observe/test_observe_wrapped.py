"""Tests that the doctor finds the same in a model and in the model within a wrapper."""

import json
import os
import subprocess
import sys

import pytest
import torch
from torch import nn

from flatout.devices.inventory import inventory
from flatout.doctor.judge import judge
from flatout.observe import Model, Observation, Optimizer
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


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_undivided_sums_of_means_are_found_or_not_counted_as_checked(tmp_path, wrapper):
    verdict = judge([seen(tmp_path, wrapper, ADDED_UP)], inventory())
    name = "accumulation_undivided"
    assert name not in verdict.passed
    assert (name in [item.name for item in verdict.findings]) is not bool(wrapper)
    unknown = dict(verdict.unknown)
    assert (name in unknown) is bool(wrapper)
    assert not wrapper or "DistributedDataParallel changes gradients" in unknown[name]


TWO_OUTPUTS = """
class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = make()

    def forward(self, rows):
        scores = self.layers(rows)
        return scores, scores.softmax(1)

model = nn.parallel.DistributedDataParallel(Two(), find_unused_parameters=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for number in range(24):
    step(functional.cross_entropy(model(rows)[{which}], torch.zeros(32).long()), optimizer)
"""


@pytest.mark.slow
@pytest.mark.parametrize("which", [0, 1])
def test_a_graph_is_read_through_the_node_that_ddp_adds_after_each_output(tmp_path, which):
    found = seen(tmp_path, "", TWO_OUTPUTS.replace("{which}", str(which))).in_losses
    inner = [sign.detail["inner"] for sign in found if sign.kind == "twice"]
    assert inner == ["softmax"] * which


HOOKED = {
    "accumulation_undivided", "activation_twice", "advanced_indexing", "batch_first_missing",
    "eval_missing", "frozen_recomputed", "gradients_discarded", "history_grows", "loss_broadcast",
    "loss_term_cut", "nan_hidden", "next_token_seen", "padding_in_loss", "recurrent_by_step",
    "scores_bounded", "seed_repeated", "softmax_of_one", "softmax_over_batch", "target_in_input",
    "target_never_moves", "teacher_in_train_mode", "views_equal",
}  # fmt: skip


def passed(seen):
    return {*judge([seen], inventory()).passed}


def test_checks_without_hooks_on_compiled_code_do_not_pass():
    seen = Observation(command=[], steps=24, models=[Model("Net")], loss_looks=8)
    seen.repeated_seeds = []
    seen.optimizers = [Optimizer("torch.optim.sgd.SGD")]
    counted = passed(seen)
    assert HOOKED - counted <= {"frozen_recomputed", "recurrent_by_step"}  # need the time of a step
    seen.compiles = [(24, 1, 0.5)]
    assert counted - passed(seen) == counted & HOOKED


def test_the_check_of_collectives_does_not_pass_in_compiled_code():
    ranks = [Observation(command=[], steps=24, rank=rank, world_size=2) for rank in (0, 1)]
    assert "collectives_each_step" in judge(ranks, inventory()).passed
    ranks[1].compiles = [(24, 1, 0.5)]
    assert "collectives_each_step" in dict(judge(ranks, inventory()).unknown)


DISCARDED = """
model = torch.compile(make(), backend="aot_eager")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
batches = torch.utils.data.DataLoader(rows, batch_size=8, shuffle=True)
for number in range(12):
    for batch in batches:
        optimizer.zero_grad()
        functional.cross_entropy(model(batch).softmax(1), torch.zeros(8).long()).backward()
    optimizer.step()
"""


@pytest.mark.slow
def test_checks_of_gradients_and_dropout_do_not_pass_in_compiled_code(tmp_path):
    assert not passed(seen(tmp_path, "", DISCARDED)) & {"gradients_discarded", "eval_missing"}


NOT_COMPILED = """
class Series(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.out = nn.LSTM(8, 16), nn.Linear(16, 4)

    def forward(self, rows):
        return self.out(self.layer(rows)[0][:, -1])

model = torch.compile(Series(), backend="aot_eager")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
batches = torch.utils.data.DataLoader(torch.randn(64, 5, 8), batch_size=8, shuffle=True)
for number in range(3):
    for batch in batches:
        step(functional.cross_entropy(model(batch), torch.zeros(8).long()), optimizer)
"""


def test_checks_do_not_pass_if_torch_makes_no_graph_of_a_compiled_model(tmp_path):
    found = seen(tmp_path, "", NOT_COMPILED)
    assert found.compiles
    assert not any(graphs for _, graphs, _ in found.compiles)
    assert "batch_first_missing" not in passed(found)


def test_the_check_of_unreached_parameters_needs_the_gradients_of_each_optimizer():
    seen = Observation(command=[], steps=24)
    seen.optimizers = [Optimizer("torch.optim.adam.Adam", gradient_looks=12) for _ in range(2)]
    assert "parameters_unreached" in passed(seen)
    seen.optimizers[1].gradient_looks = 0
    assert "parameters_unreached" not in passed(seen)


MISTAKES = """
import os, sys, torch; torch.manual_seed(0)
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler
is_wrong = sys.argv[1] == "wrong"
torch.distributed.init_process_group("gloo")
data = TensorDataset(torch.randn(256, 8), torch.randint(4, (256,)))
sampler = DistributedSampler(data)
loader = DataLoader(data, 16, sampler=sampler)
last = nn.Softmax(1) if is_wrong else nn.Identity()
model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 4), last)
model = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(12):
    sampler.set_epoch(epoch)
    model.train()
    for number, (rows, kinds) in enumerate(loader, 1):
        if is_wrong:
            optimizer.zero_grad()
        (nn.functional.cross_entropy(model(rows), kinds) / 4).backward()
        if number % 4 == 0:
            optimizer.step()
            optimizer.zero_grad()
    model.train(is_wrong)
    with torch.no_grad():
        for rows, kinds in loader:
            print(nn.functional.cross_entropy(model(rows), kinds).item())
"""
TWO = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python")
CHECKS_OF_MISTAKES = {"eval_missing", "activation_twice", "gradients_discarded"}


@pytest.mark.slow
@pytest.mark.parametrize("which", ["wrong", "right"])
def test_mistakes_are_found_on_two_ranks(tmp_path, which):
    (tmp_path / "script.py").write_text(MISTAKES)
    watch = (sys.executable, "-m", "flatout.observe.start", "seen", "script.py", which)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", *TWO, *watch]
    ran = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
    )
    assert ran.returncode == 0, ran.stderr
    files = sorted((tmp_path / "seen").glob("rank-*.json"))
    ranks = [Observation.of(json.loads(file.read_text())) for file in files]
    assert [rank.world_size for rank in ranks] == [2, 2]
    verdict = judge(ranks, inventory())
    found = [item for item in verdict.findings if item.name in CHECKS_OF_MISTAKES]
    assert {item.name for item in found} == (CHECKS_OF_MISTAKES if which == "wrong" else set())
    assert not [item for item in found if "only rank" in item.what]
    assert which == "wrong" or {*verdict.passed} >= CHECKS_OF_MISTAKES
