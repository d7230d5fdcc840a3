"""Whole runs with and without what was prescribed: what they say, and real ones."""

import math
import os

import pytest

from flatout.doctor.finding import Edit
from flatout.doctor.prescription import Prescription, Proof
from flatout.doctor.verify import STUDENT, Verified, WholeRun, verify

SCRIPT = """
import sys, torch
from torch import nn
torch.set_num_threads(1)
if "seeded" in sys.argv:
    torch.manual_seed(7)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.randn(64, 4)
y = x.sum(1, keepdim=True)
for step in range(300):
    optimizer.zero_grad(set_to_none=False)
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
open("made", "w").write("here")
if "fails" in sys.argv:
    raise ValueError("no such weather")
"""
RATE = "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)"


def pairs(plain, cured):
    return [
        (WholeRun(a, 100, 10.0), WholeRun(b, 100, 5.0)) for a, b in zip(plain, cured, strict=True)
    ]


def test_an_interval_of_paired_differences():
    found = Verified(pairs([1.0, 2.0, 3.0], [1.1, 2.3, 3.2]))
    low, middle, high = found.difference
    # The differences are .1, .3, .2: their standard error is .1 / sqrt(3).
    assert middle == pytest.approx(0.2)
    assert high - middle == pytest.approx(4.303 * 0.1 / math.sqrt(3), rel=1e-3)
    assert middle - low == pytest.approx(high - middle)
    said, times = found.words()
    assert "whole runs, 3 seeds: final loss 2 → 2.2, +0.2 [-0.048, +0.45]: no difference" in said
    assert "10 s → 5 s, 2.00x" in times


def test_student_is_students():
    stats = pytest.importorskip("scipy.stats")
    for count, reach in STUDENT.items():
        assert reach == pytest.approx(stats.t.ppf(0.975, count - 1), abs=0.006)


@pytest.mark.parametrize(
    ("plain", "cured", "said"),
    [
        ([1.0, 2.0, 3.0], [1.5, 2.5, 3.51], "it grows"),
        ([1.0, 2.0, 3.0], [0.5, 1.5, 2.49], "it falls"),
        ([1.0, 2.0], [1.0, 2.0], "the same in each"),
        ([1.0, 1.0], [1.1, 1.1], "the script seeds itself"),
        ([1.0], [1.1], "one comparison only"),
    ],
)
def test_what_whole_runs_say(plain, cured, said):
    assert said in Verified(pairs(plain, cured)).words()[0]


def prescription(**cure):
    return Prescription([Proof(("a",), "a cure", outcome="prescribed", **cure)])


@pytest.fixture
def what(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)
    return ["train.py"]


@pytest.mark.slow
def test_an_exact_cure_gives_the_same_losses_for_each_seed(what):
    told = []
    given = prescription(recipe={"script.zero_grad": "set_to_none"})
    found = verify(what, given, seeds=2, told=told.append)
    assert not found.stopped
    assert [run.steps for pair in found.pairs for run in pair] == [300] * 4
    assert not found.draws_alike
    assert "the same in each" in found.words()[0]
    assert len(told) == 4
    assert not os.path.exists("made")


@pytest.mark.slow
def test_a_cure_that_learns_worse_is_seen(what):
    line = SCRIPT.splitlines().index(RATE) + 1
    edit = Edit(os.path.abspath("train.py"), line, RATE, RATE.replace("0.1", "1e-4"))
    found = verify([*what, "seeded"], prescription(edits=(edit,)), seeds=2)
    ((plain, cured), again) = found.pairs
    assert plain.loss < 0.01 < cured.loss
    assert (again[0].loss, again[1].loss) == (plain.loss, cured.loss)
    assert "seeds itself" in found.words()[0]


@pytest.mark.slow
def test_a_run_that_fails_ends_it(what):
    found = verify([*what, "fails"], prescription(recipe={"process.threads": 1}), seeds=2)
    assert found.pairs == []
    assert "no such weather" in found.words()[0]
