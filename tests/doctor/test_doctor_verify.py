"""Whole runs with and without what was prescribed: what they say, and real ones."""

import math
import os

import numpy as np
import pytest
from hypothesis import given as for_any
from hypothesis import strategies as st

from flatout.doctor.finding import Edit
from flatout.doctor.prescription import Prescription, Proof
from flatout.doctor.trials.whole import LAST, Curve
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
    said, times, _ = found.words()
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
        ([1.0, 1.0], [1.0, 1.0], "in each, which is one comparison only: the script seeds itself"),
        ([1.0], [1.1], "one comparison only"),
    ],
)
def test_what_whole_runs_say(plain, cured, said):
    assert said in Verified(pairs(plain, cured)).words()[0]


def timed(*seconds):
    """For each pair the seconds to the target, without and with."""
    return [tuple(WholeRun(1.0, 100, 10.0, to_target) for to_target in pair) for pair in seconds]


@pytest.mark.parametrize(
    ("pairs", "target", "said"),
    [
        (timed((4.0, 2.0), (6.0, 2.0)), 0.5, "  time to a loss of 0.5: 5 s → 2 s, 2.50x"),
        (timed((4.0, 2.0)), None, "  time to the loss that both reach: 4 s → 2 s, 2.00x"),
        (
            timed((4.0, 2.0), (None, 2.0)),
            0.1,
            "  a loss of 0.1 was reached by 1 of 2 runs of the script as it is, by 2 of 2 "
            "runs with the proven settings",
        ),
    ],
)
def test_what_is_said_of_the_time_to_a_target(pairs, target, said):
    assert Verified(pairs, target=target).words()[-1] == said


def written(tmp_path, at, losses):
    file = tmp_path / "losses"
    file.write_bytes(np.array([at, losses], dtype=np.float64).T.tobytes())
    return file


def test_a_target_is_reached_where_the_mean_is_that_low_not_one_step(tmp_path):
    losses = [2.0] * 40 + [0.0] + [2.0] * 39 + [1.0] * 20  # one lucky batch
    curve = Curve.read(written(tmp_path, [100.0 + step for step in range(100)], losses), 90.0)
    assert (curve.steps, curve.final()) == (100, 1.0)
    # Five steps are 5%: their mean is 1 at the fifth of the last twenty.
    assert curve.reached(1.0) == 94.0
    assert curve.reached(1.7) == 50.0
    assert curve.reached(0.9) is None


def test_steps_without_a_loss_are_counted_and_left_out(tmp_path):
    curve = Curve.read(written(tmp_path, [1.0, 2.0, 3.0], [4.0, math.nan, math.nan]), 0.0)
    assert (curve.steps, curve.final(), curve.reached(4.0)) == (3, 4.0, 1.0)


@pytest.mark.parametrize("losses", [[], [math.nan]])
def test_a_run_without_losses_reaches_nothing(tmp_path, losses):
    curve = Curve.read(written(tmp_path, [1.0] * len(losses), losses), 0.0)
    assert math.isnan(curve.final())
    assert curve.reached(1e9) is None


def test_a_run_that_wrote_nothing_has_no_losses(tmp_path):
    assert Curve.read(tmp_path / "none", 0.0).steps == 0


def test_a_loss_that_overflowed_once_does_not_hide_what_came_after():
    losses = np.array([2.0] * 10 + [math.inf] + [2.0] * 9 + [1.0] * 20)
    curve = Curve(40, np.arange(40.0), losses)
    assert curve.reached(1.0) == 21.0


@for_any(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=200))
def test_every_run_reaches_its_own_final_loss_first_where_the_plain_definition_says(losses):
    curve = Curve(len(losses), np.arange(1.0, len(losses) + 1), np.array(losses))
    reached = curve.reached(curve.final())
    window = math.ceil(LAST * len(losses))
    means = [np.mean(losses[end - window : end]) for end in range(window, len(losses) + 1)]
    # What sums of millions lose to rounding may decide where two means are as good as equal.
    near = [end for end, mean in enumerate(means, window) if mean <= curve.final() + 1e-6]
    below = [end for end, mean in enumerate(means, window) if mean <= curve.final() - 1e-6]
    assert near[0] <= reached <= min([*below[:1], len(losses)])


def prescription(**cure):
    return Prescription([Proof(("a",), "a cure", outcome="prescribed", **cure)])


@pytest.fixture
def what(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)
    return ["train.py"]


@pytest.mark.slow
@pytest.mark.long
def test_an_exact_cure_gives_the_same_losses_for_each_seed(what):
    told = []
    given = prescription(recipe={"script.zero_grad": "set_to_none"})
    found = verify(what, given, seeds=2, told=told.append)
    assert not found.stopped
    assert [run.steps for pair in found.pairs for run in pair] == [300] * 4
    assert not found.draws_alike
    assert "the same in each" in found.words()[0]
    assert all(0 < run.to_target_s < run.seconds for pair in found.pairs for run in pair)
    assert len(told) == 4
    assert not os.path.exists("made")


@pytest.mark.slow
def test_a_cure_that_learns_worse_is_seen(what):
    line = SCRIPT.splitlines().index(RATE) + 1
    edit = Edit(os.path.abspath("train.py"), line, RATE, RATE.replace("0.1", "1e-4"))
    found = verify([*what, "seeded"], prescription(edits=(edit,)), seeds=2, target=0.1)
    ((plain, cured), again) = found.pairs
    assert plain.loss < 0.01 < cured.loss
    assert (again[0].loss, again[1].loss) == (plain.loss, cured.loss)
    assert "seeds itself" in found.words()[0]
    assert [run.to_target_s is None for run in found.pairs[0]] == [False, True]
    assert (
        "a loss of 0.1 was reached by 2 of 2 runs of the script as it is, by 0 of 2"
        in found.words()[2]
    )


@pytest.mark.slow
def test_a_run_that_fails_ends_it(what):
    found = verify([*what, "fails"], prescription(recipe={"process.threads": 1}), seeds=2)
    assert found.pairs == []
    assert "no such weather" in found.words()[0]
