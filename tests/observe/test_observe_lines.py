"""Stacks told as lines: the user's, with those above them, and what grows from step to step."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy
import pytest

from flatout.kernels import Clock, stacks_of
from flatout.measure import LANES
from flatout.observe import Observation
from flatout.observe.lanes import EVALUATION, FORWARD, HOST
from flatout.observe.line_sampler import _move_evaluation
from flatout.observe.lines import Lines, growth
from flatout.observe.stacks import Place, Stack, _without_arguments, codes, stacks_in

SCRIPT = """
import gc
import torch
from tracker import Tracker

torch.manual_seed(0)
model = torch.nn.Linear(16, 4)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
tracker = Tracker()

def batch():
    return torch.tensor([[float(i + j) for j in range(16)] for i in range(64)])

gc.freeze()  # the collector does not list what is frozen
for step in range(100000):
    rows = batch()
    loss = model(rows).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    tracker.update(loss)
"""

TRACKER = """
import torch

class Tracker:
    def __init__(self):
        self.seen = []

    def update(self, loss):
        self.seen.append(float(loss))
        self.slow(400)

    def slow(self, times):
        for _ in range(times):
            max(range(200))
"""


@pytest.mark.slow
@pytest.mark.skipif(stacks_of(Clock()) is None, reason="this Python's frames cannot be read")
def test_a_slow_logger_and_batches_by_hand_are_told_by_their_lines(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "tracker.py").write_text(TRACKER)
    observe = [sys.executable, "-m", "flatout.observe.start", "seen", "--seconds", "8", "script.py"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    ran = subprocess.run(observe, cwd=tmp_path, env=environment, capture_output=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    seen = Observation.of(json.loads((tmp_path / "seen" / "rank-0.json").read_text()))

    assert seen.explained > 0.9
    host = max(seen.lines, key=lambda line: line.lanes_ms.get("host", 0.0))
    assert host.site.code == "max(range(200))"
    assert host.words == "max"
    assert [site.code for site in host.callers] == ["self.slow(400)", "tracker.update(loss)"]
    made = max(seen.lines, key=lambda line: line.lanes_ms.get("input", 0.0))
    assert made.site.code.startswith("return torch.tensor(")
    assert made.callers[0].code == "rows = batch()"
    assert seen.lanes_ms["input"] > 0
    assert any("time of lines that made them" in note for note in seen.notes)
    assert sum(line.ms for line in seen.lines) <= 1.01 * sum(
        ms or 0 for ms in seen.lanes_ms.values()
    )


def test_what_grows_is_told_with_its_interval_and_noise_is_not():
    found = growth([1.0 + 0.2 * at for at in range(12)], 50, 2000)
    assert found.low < found.us < found.high
    assert found.us == pytest.approx(1e3 * 0.2 / 50)
    noise = [0.9, 1.2, 1.0, 1.1, 0.8, 1.3, 1.0, 0.9, 1.2, 1.0, 1.1, 1.2]
    assert growth(noise, 50, 2000) is None
    assert growth([1.0 + 0.01 * at for at in range(12)], 50, 10**6) is None  # it does not matter
    assert growth([1.0 + 0.2 * at for at in range(12)], 50, 20) is None  # too few samples
    assert growth([0.0] * 8, 50, 2000) is None


@pytest.mark.parametrize("bins", [5, 12, 40, 98])
def test_what_takes_more_all_at_once_does_not_grow(bins):
    wobble = [0.02 * (7 * at % 5 - 2) for at in range(bins)]
    several = ([0.25, 0.5, 0.75], [0.1, 0.3, 0.4, 0.9]) if bins > 12 else ()
    for jumps in ([0.5], [0.8], [0.3, 0.7], *several):
        steps = [1.0 + sum(at >= jump * bins for jump in jumps) for at in range(bins)]
        assert growth([a + b for a, b in zip(steps, wobble, strict=True)], 50, 3000) is None
    grows = [1.0 + 2 * at / bins + off for at, off in enumerate(wobble)]
    assert growth(grows, 50, 3000) is not None
    # Also where it has jumped.
    both = [item + (at >= bins / 2) for at, item in enumerate(grows)]
    assert growth(both, 50, 3000) is not None


def layer_of_keras():
    """A class as if it were a layer of the installed package."""
    names = {}
    package = str(Path(numpy.__file__).parents[1] / "keras" / "src" / "layers.py")
    layer = "class Conv:\n    def call(self):\n        return 1\n    def __call__(self):\n"
    exec(compile(layer + "        return self.call()\n", package, "exec"), names)
    return names["Conv"]


@pytest.mark.slow
def test_a_trainers_layers_are_told_beneath_the_line_that_starts_it():
    conv, here = layer_of_keras(), test_a_trainers_layers_are_told_beneath_the_line_that_starts_it
    nodes = [
        (-1, id(here.__code__), 0, 0, [], []),
        (0, id(conv.__call__.__code__), 0, 0, [], []),
        (1, id(conv.call.__code__), 0, 4, [0.0, 0.0, 4.0] + [0.0] * 9, [4.0] * 16),
        (0, 12345, 0, 2, [0.0] * 6 + [2.0] + [0.0] * 5, [2.0] * 16),  # code that is gone
        (-1, id(here.__code__), 10**6, 1, [1.0] + [0.0] * 11, [1.0] * 16),  # and another's place
    ]
    known = codes([here.__code__])
    known.update({id(one.__code__): one.__code__ for one in (conv.__call__, conv.call)})
    layer, gone, nowhere = stacks_in(nodes, known)
    assert (layer.within, layer.trainer, layer.samples) == ("Conv", "keras", 4)
    assert (gone.within, gone.trainer) == ("", "")
    assert layer.users == gone.users == (layer.line.site,)
    assert nowhere.users == ()


def test_a_line_that_evaluates_and_trains_is_not_moved_to_evaluation():
    def stack(line, lane, ns):
        spent = [0.0] * 12
        spent[lane] = ns
        return Stack(None, (("train.py", line),), "", "", 1, spent, [])

    stacks = [stack(8, FORWARD, 90.0), stack(20, FORWARD, 9.0), stack(9, HOST, 1.0)]
    _move_evaluation(stacks, ("train.py", 20), 0.1)
    assert (stacks[1].ns[EVALUATION], stacks[1].ns[FORWARD]) == (9.0, 0.0)
    _move_evaluation(stacks, ("train.py", 8), 0.1)
    assert stacks[0].ns[FORWARD] == 90.0


@pytest.mark.parametrize("is_told", [False, True])
def test_what_ranks_wait_for_is_a_lines_whatever_lane_it_is_told_in(is_told):
    spent = {"sync": 30.0, "host": 10.0, "backward": 60.0}
    places = {lane: Place(compile(lane, f"{lane}.py", "exec"), 0) for lane in spent}
    stacks = [
        Stack(place, (place.site,), "", "", 9, [ns * (name == lane) for name in LANES], [])
        for (lane, place), ns in zip(places.items(), spent.values(), strict=True)
    ]
    lanes_ms = {"sync": 3.0, "host": 1.0} if is_told else {"sync": None, "host": 4.0}
    lines = Lines(stacks, {**lanes_ms, "backward": 6.0}, 100, 1)
    assert lines.explained == pytest.approx(1.0)
    assert {line.site.file: line.ms for line in lines.most()} == {
        "backward.py": 6.0, "sync.py": 3.0, "host.py": 1.0
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("model.fit(x, y,", "model.fit"),
        ("self.add(1).then(f(x),", "self.add(1).then"),
        ("run(f(x))", "run"),
        ("x @ y", "x @ y"),
    ],
)
def test_a_call_is_told_without_its_arguments(text, words):
    assert _without_arguments(text) == words
