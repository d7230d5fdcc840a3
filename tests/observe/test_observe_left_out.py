"""Calls whose value is not used: which may be left out of a running script, and what that shows."""

import ast
import builtins
import json
import os
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch

from flatout.observe import Observation
from flatout.observe.observation import Line, Site
from flatout.observe.rewriting import Rewriting
from flatout.observe.side_effects import SideEffects, hot_calls, outermost
from flatout.observe.unused_calls import CALLS, with_conditions
from flatout.observe.watch import Watch

STEPS = """
import torch, wandb
for step, (x, y) in enumerate(loader):
    opt.zero_grad()
    loss = f(model(x), y)
    loss.backward()
    buffer.push(x)
    batch = buffer.sample(3)
    q = torch.quantile(torch.cat([p.grad.flatten() for p in model.parameters()]), 0.5)
    twice = q * 2
    logger.log({"q": q, "twice": twice})
    history["loss"] = loss.item()
    losses.append(loss.item())
    opt.step()
    wandb.log({"a": 1})
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1)
    self.tracker.log(model, loss)
    model.train()
    writer.add_histogram("w", weights)
    plt.plot(figures)
print(sum(losses))
"""


def test_calls_whose_value_is_used_or_that_train_have_no_condition():
    tree, calls = with_conditions(ast.parse(STEPS), "train.py", 0)
    compile(tree, "train.py", "exec")
    assert [call.words for call in calls] == [
        *("logger.log", "loss.item", "losses.append", "wandb.log", "self.tracker.log"),
        *("writer.add_histogram", "plt.plot"),
    ]
    log = calls[0]
    assert (log.line, log.end_line, log.call_line) == (9, 11, 11)  # what is read there alone, too


def test_what_another_method_of_a_step_reads_is_used(tmp_path):
    source = """
class Agent:
    def collect(self, x):
        self.memory.push(x)
        self.tracker.log(x)
    def learn(self):
        batch = self.memory.sample(8)
        self.optimizer.step()
    def on_epoch_end(self):
        print(self.tracker.mean())
    def run(self, xs):
        for x in xs:
            self.collect(x)
            self.learn()
"""
    script = tmp_path / "agent.py"
    script.write_text(source)
    code = Rewriting([str(script)])
    code.code(source.encode(), str(script))
    words = [call.words for call in code.calls]
    assert "self.memory.push" not in words
    assert "self.tracker.log" in words


def test_functions_that_others_compile_are_left_as_they_are():
    source = "@njit\ndef f(x):\n    for y in x:\n        g.log(y)\n"
    tree, calls = with_conditions(ast.parse(source), "train.py", 0)
    assert not calls
    assert ast.unparse(tree) == source.strip()


def test_a_script_that_compiles_functions_is_left_as_it_is(tmp_path):
    script = tmp_path / "script.py"
    (tmp_path / "net.py").write_text("step = torch.compile(step)\n")
    source = b"import net\nfor x in range(3):\n    log.tell(x)\n    opt.step()\n"
    script.write_bytes(source)
    code = Rewriting([str(script)])
    assert code.code(source, str(script)) == compile(source, str(script), "exec")
    assert (code.calls, code.loops) == ([], [])


def _watched(tmp_path, body, **names):
    """What the calls in a loop of three steps have changed, by the words of each."""
    source = f"def steps():\n    for step in range(4):\n        {body}\n"
    script = tmp_path / "script.py"
    script.write_text(source)
    code = Rewriting([str(script)])
    watch = Watch()
    watch.lanes.thread = threading.get_ident()
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    watch.models = [type("Seen", (), {"ref": staticmethod(lambda: model)})]
    watch.optimizers = [type("Seen", (), {"ref": staticmethod(lambda: optimizer)})]
    namespace = {"model": model, "optimizer": optimizer, "torch": torch, **names}
    exec(code.code(source.encode(), str(script)), namespace)
    effects = SideEffects(watch, code, list(range(len(code.calls))))
    try:
        namespace["steps"]()
    finally:
        clean = effects.end()
        delattr(builtins, CALLS)
    assert effects.is_done
    return {code.calls[number].words: what for number, what in effects.changed.items()}, clean


class _Average:
    def __init__(self):
        self.shadow = {"weight": torch.zeros(4, 4)}

    def follow(self, model):
        self.shadow["weight"] = 0.9 * self.shadow["weight"] + 0.1 * model.weight.detach()


class _Tracker:
    def __init__(self):
        self.rows = []

    def log(self, model):
        self.rows.append([p.norm().item() for p in model.parameters()])


class _Bank:
    """Features that a later step may be compared with."""

    def __init__(self):
        self.features = torch.zeros(9, 3)
        self.ages = np.zeros(9)

    def update(self, model):
        self.features[0] += 1

    def grow(self, model):
        self.features = torch.cat([self.features, torch.ones(1, 3)])

    def age(self, model):
        self.ages += 1


@torch.no_grad()
def _decay(model):
    model.weight.data.mul_(0.9)


def test_what_tells_or_keeps_figures_changes_nothing(tmp_path):
    changed, clean = _watched(tmp_path, "tracker.log(model)", tracker=_Tracker())
    assert (changed, clean) == ({"tracker.log": ""}, [0])


@pytest.mark.parametrize(
    ("body", "names", "what"),
    [
        ("average.follow(model)", {"average": _Average()}, "tensors like weights"),
        ("bank.update(model)", {"bank": _Bank()}, "tensors that it keeps"),
        ("bank.grow(model)", {"bank": _Bank()}, "tensors that it keeps"),
        ("bank.age(model)", {"bank": _Bank()}, "arrays that it keeps"),
        ("decay(model)", {"decay": _decay}, "weights"),
        ("noise(4)", {"noise": torch.rand}, "random numbers"),
        ("freeze(model)", {"freeze": lambda model: model.eval()}, "modes"),
        (
            "warm(optimizer)",
            {"warm": lambda o: o.param_groups[0].update(lr=o.defaults["lr"] / 2)},
            "rates",
        ),
    ],
)
def test_what_training_goes_on_from_is_seen_to_change(tmp_path, body, names, what):
    changed, clean = _watched(tmp_path, body, **names)
    ((_, seen),) = changed.items()
    assert what in seen
    assert not clean


def test_the_outermost_call_of_a_hot_line_is_chosen(tmp_path):
    script = tmp_path / "script.py"
    source = (
        "def log(self):\n    self.rows.append(1)\n    self.write(2)\n"
        "def run(tracker):\n    for step in range(9):\n        tracker.log(step)\n"
    )
    script.write_text(source)
    code = Rewriting([str(script)])
    code.code(source.encode(), str(script))
    assert [call.words for call in code.calls] == ["self.rows.append", "self.write", "tracker.log"]
    file = str(script)
    seen = Observation(["script.py"], lanes_ms={"host": 10.0})
    seen.lines = [
        Line(Site(file, 3), 4.0, callers=[Site(file, 6)]),
        Line(Site(file, 2), 3.0, callers=[Site(file, 6)]),
        Line(Site(file, 6), 0.1),
    ]
    chains = hot_calls(seen, code)
    assert chains == [[1, 2], [0, 2]]
    assert outermost(chains, [0, 1, 2]) == [2]
    assert outermost(chains, [0, 1]) == [1, 0]
    assert outermost(chains, []) == []


TRACKED = """
import torch
from engine import Tracker, average
torch.manual_seed(0)
model = torch.nn.Linear(32, 32)
slow = torch.nn.Linear(32, 32)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
tracker = Tracker()
while True:
    optimizer.zero_grad()
    loss = model(torch.ones(8, 32)).square().mean()
    loss.backward()
    optimizer.step()
    average(slow, model)
    tracker.log(model, loss)
"""

ENGINE = """
import time, torch
class Tracker:
    def __init__(self):
        self.rows = []
    def log(self, model, loss):
        self.rows.append(loss.item())
        for part in model.parameters():
            self.rows.append(self.spread(part.grad))
    def spread(self, gradient):
        return [torch.quantile(gradient, q / 50).item() for q in range(1, 50)]
@torch.no_grad()
def average(slow, model):
    for _ in range(200):
        for a, b in zip(slow.parameters(), model.parameters()):
            a.lerp_(b, 0.001)
"""


@pytest.mark.slow
def test_a_tracker_two_modules_away_has_a_proven_figure(tmp_path):
    (tmp_path / "engine.py").write_text(ENGINE)
    (tmp_path / "script.py").write_text(TRACKED)
    options = ("--seconds", "8", "--ablate", "4")
    ran = subprocess.run(
        [sys.executable, "-m", "flatout.observe.start", "seen", *options, "script.py"],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert ran.returncode == 0, ran.stderr
    seen = Observation.of(json.loads((tmp_path / "seen" / "rank-0.json").read_text()))
    assert [one.words for one in seen.left_out] == ["tracker.log"], seen.notes
    (found,) = seen.left_out
    assert found.site.code == "tracker.log(model, loss)"
    assert found.measured.pairs >= 2
    assert "ablations: average stays in: it changes tensors like weights" in seen.notes
