"""Epochs that end early, so that what comes after them is seen."""

import ast
import builtins
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from flatout.observe import Observation
from flatout.observe.lapse import TimeLapse, with_lapse
from flatout.observe.loaders import watch_loaders
from flatout.observe.loops import Loops
from flatout.observe.observation import Lapse, Loader, Model, Schedule, Site
from flatout.observe.rewriting import Rewriting, files_of, names_that_step, steps_schedules
from flatout.observe.watch import Watch

LONG = """
import torch
from torch.utils.data import DataLoader, TensorDataset
from engine.trainer import Trainer
torch.manual_seed(0)
data = TensorDataset(torch.randn(400_003, 8), torch.randint(0, 2, (400_003,)))
held_out = TensorDataset(torch.randn(90_000, 8), torch.randint(0, 2, (90_000,)))
layers = [torch.nn.Linear(8, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 2)]
model = torch.nn.Sequential(*layers)
Trainer(model).fit(DataLoader(data, 4, shuffle=True), DataLoader(held_out, 1))
"""

TRAINER = """
import torch
class Validation:
    def on_epoch_end(self, trainer, batches):
        with torch.no_grad():
            print(sum(trainer.model(x).sum() for x, _ in batches))
class Trainer:
    def __init__(self, model):
        self.model = model
        self.optimizer = torch.optim.SGD(model.parameters(), 0.01)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 1)
        self.callbacks = [Validation()]
        self.sizes = []
    def training_step(self, x, y):
        self.optimizer.zero_grad()
        torch.nn.functional.cross_entropy(self.model(x), y).backward()
        self.optimizer.step()
        self.sizes.append(len(x))
    def fit(self, train, held_out):
        for epoch in range(50):
            for x, y in train:
                self.training_step(x, y)
            self.schedule.step()
            for callback in self.callbacks:
                callback.on_epoch_end(self, held_out)
            torch.save(self.model.state_dict(), "last.pt")
            print("last batch", self.sizes[-1], flush=True)
"""


def _rewritten(tmp_path, source):
    script = tmp_path / "script.py"
    script.write_text(source)
    rewriting = Rewriting([str(script)])
    return rewriting, rewriting.code(source.encode(), str(script))


def test_loops_that_step_go_through_a_function_of_ours(tmp_path):
    source = (
        "def train(xs, step):\n    for x in xs:\n        step(x)\n"
        "@compiled\ndef left(xs, step):\n    for x in xs:\n        step(x)\n"
        "for x in []:\n    print(x)\n"
        "with torch.no_grad():\n    for x in []:\n        model(x)\n"
    )
    rewriting, code = _rewritten(tmp_path, source)
    assert [line for _, line in rewriting.loops] == [2, 11]
    plain = compile(source, "script.py", "exec")

    def positions(code):
        inner = [one for one in code.co_consts if hasattr(one, "co_code")]
        return [code.co_firstlineno, *(line for one in inner for line in positions(one))]

    assert positions(code) == positions(plain)


def run(code, **names):
    """The names of a module whose code this is, and the loops that a function of ours got."""
    asked = []

    def around(number, what):
        assert what is None
        for turn in range(1000):
            asked.append(number)
            yield turn

    builtins.__flatout_loops__ = around
    try:
        exec(code, names)
    finally:
        del builtins.__flatout_loops__
    return names, asked


@pytest.mark.parametrize(
    ("source", "left"),
    [
        ("while left:\n    left -= 1\n    step()\n", 0),
        (
            "while True:\n    left -= 1\n    if left > 3: continue\n    step()\n    break\n",
            3,
        ),
        ("while (now := left) > 2:\n    left -= 1\n    step()\n", 2),
        ("while left:\n    step()\n    left -= 1\n    while left > 4:\n        left -= 1\n", 0),
    ],
)
def test_a_while_that_steps_is_a_loop_of_ours_and_ends_as_before(tmp_path, source, left):
    rewriting, code = _rewritten(tmp_path, source)
    assert [line for _, line in rewriting.loops] == [1]
    plain, steps = {"left": 9, "step": lambda: None}, []
    exec(source, plain)
    names, asked = run(code, left=9, step=lambda: steps.append(1))
    assert names["left"] == plain["left"] == left
    assert len(asked) >= len(steps) > 0


@pytest.mark.parametrize(
    "source",
    [
        "while left:\n    left -= 1\n",
        "while left:\n    step()\n    left = 0\nelse:\n    left = 7\n",
        "def f():\n while True:\n  step()\n  for x in []: break\n  return 1\n",
    ],
)
def test_another_while_stays_as_it_is(tmp_path, source):
    rewriting, code = _rewritten(tmp_path, source)
    assert rewriting.loops == []
    assert run(code, left=9, step=lambda: None)[1] == []


def test_what_a_while_raises_is_told_with_its_lines(tmp_path):
    source = "def train(step):\n    while ready(step):\n        step()\ntrain(len)\n"
    _, code = _rewritten(tmp_path, source)
    with pytest.raises(ZeroDivisionError) as failed:
        run(code, ready=lambda step: 1 / 0)
    assert [entry.lineno for entry in failed.traceback[-3:-1]] == [3, 1]


def test_functions_that_step_are_known_by_name_across_files(tmp_path):
    (tmp_path / "engine").mkdir()
    (tmp_path / "engine" / "__init__.py").write_text("from .loop import run\n")
    (tmp_path / "engine" / "loop.py").write_text(
        "def run(o):\n    o.step()\ndef tell(o):\n    o()\n"
    )
    script = tmp_path / "train.py"
    script.write_text("import torch, engine\ndef epoch(o):\n    engine.run(o)\n")
    files = files_of(script, tmp_path)
    assert {path.name for path in files} == {"train.py", "__init__.py", "loop.py"}
    names = names_that_step(files.values())
    assert {"run", "epoch"} <= names
    assert "tell" not in names


@pytest.mark.parametrize(
    ("source", "is_stepped"),
    [
        ("plan = StepLR(o, 1)\nplan.step()", True),
        ("self.lr_scheduler.step()", True),
        ("plan = StepLR(o, 1)\no.step()", False),
        ("plan = ReduceLROnPlateau(o)\nplan.step(loss)", True),
    ],
)
def test_a_schedule_that_no_line_steps_is_told(tmp_path, source, is_stepped):
    ast.parse(source)
    script = tmp_path / "train.py"
    script.write_text(source)
    assert steps_schedules(files_of(script, tmp_path).values()) is is_stepped


class _Stepping:
    """A loop of steps in this process."""

    def __init__(self):
        self.watch = Watch()
        self.watch.lanes.thread = threading.get_ident()
        self.loops = Loops(self.watch.lanes)

    def step(self):
        lanes = self.watch.lanes
        lanes.enter(5)
        lanes.lap(False)


def test_a_loop_over_numbers_ends_with_its_last_one():
    job = _Stepping()
    job.step()
    took = []
    for epoch in job.loops.around(0, range(3)):
        if epoch == 1:
            job.loops.ends_early = True
        for at in job.loops.around(1, range(0, 1000, 10)):
            took.append((epoch, at))
            job.step()
    assert [sum(one == epoch for one, _ in took) for epoch in range(3)] == [100, 5, 5]
    assert {at for epoch, at in took if epoch} == {0, 10, 20, 30, 990}
    assert job.loops.cut == {1: (5, 100)}
    assert job.loops.epochs == 2
    assert job.loops.had_epoch


def test_the_steps_of_a_run_are_told_by_the_lengths_of_its_loops():
    job, known = _Stepping(), []
    for _ in job.loops.around(0, range(3)):
        for at in job.loops.around(1, range(50)):
            job.step()
            known += [job.loops.steps_of_run()] if at in (0, 20) else []
        for _ in job.loops.around(2, range(4)):
            known.append(job.loops.steps_of_run())  # where none steps
            assert job.loops.epochs_of() == [(0, 3)]
    assert known[:2] == [None, 150]
    assert set(known[6:8]) == {150}
    for _ in job.loops.around(3, iter(range(5))):
        for _ in job.loops.around(4, range(50)):
            job.step()
    assert job.loops.steps_of_run() is None
    assert job.loops.epochs_of() == [(0, 3)]  # though it has ended


def test_where_a_loader_is_behind_a_loop_it_ends_by_itself():
    job = _Stepping()
    job.loops.ends_early = True
    batches = []
    for number, _ in job.loops.around(0, enumerate(range(20))):
        batches.append(number)
        job.step()
    assert len(batches) == 20
    job.loops.ends_unsized = True
    assert sum(job.step() is None for _ in job.loops.around(1, iter(range(20)))) == 4


def test_a_while_ends_early_where_it_steps_alone():
    job = _Stepping()
    job.loops.ends_early = job.loops.ends_unsized = True
    job.watch.lanes.is_open = True
    waits = job.loops.around(0, None)
    assert len([turn for turn, _ in zip(range(50), waits, strict=False)]) == 50
    waits.close()
    job.watch.lanes.is_open = False
    assert sum(job.step() is None for _ in job.loops.around(1, None)) == 4
    assert job.loops.cut == {1: (4, None)}


def test_loops_that_do_not_step_run_to_their_end():
    job = _Stepping()
    job.loops.ends_early = True
    assert [*job.loops.around(0, "abcdefgh")] == [*"abcdefgh"]
    assert not job.loops.cut


class _Stream(IterableDataset):
    def __iter__(self):
        return iter(torch.arange(1000.0))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_gives_its_last_batch_too(workers, tmp_path, monkeypatch):
    module = sys.modules["torch.utils.data.dataloader"]
    base = module._BaseDataLoaderIter
    for name in ("__init__", "__next__", "_next_index"):
        monkeypatch.setattr(base, name, getattr(base, name))
    monkeypatch.setattr(module.DataLoader, "__iter__", module.DataLoader.__iter__)
    job = _Stepping()
    watch_loaders(module, job.watch, looks_within=False)
    job.step()
    loader = DataLoader(TensorDataset(torch.arange(1003.0)), 10, num_workers=workers)
    stream = DataLoader(_Stream(), 10)
    rewriting = Rewriting([str(tmp_path / "none.py")])
    lapse = TimeLapse(job.watch, job.loops, rewriting, 60.0)
    next(iter(loader))
    job.watch.loaders[0].in_training = True
    assert lapse.why_not() is None
    lapse.begin()
    try:
        sizes = []
        for (batch,) in loader:
            sizes.append(len(batch))
            job.step()
        streamed = [*stream]
    finally:
        lapse.end()
    assert sizes[-1] == 3
    assert set(sizes[:-1]) == {10}
    assert len(sizes) <= 5 + 2 * workers
    assert len(streamed) == 2  # it evaluates, as far as anyone knows
    assert len(loader) == 101


def test_times_and_counts_stay_those_of_before():
    site = Site("train.py", 3)
    seen = Observation(["train.py"], steps=50, lanes_ms={"evaluation": 0.0})
    seen.loaders = [Loader("DataLoader", site, length=9, epochs=1, hashes=[1], first_ms=[5.0])]
    seen.models = [Model("Net", site)]
    seen.schedules = [Schedule("StepLR", site)]
    later = Observation(["train.py"], steps=70, lanes_ms={"evaluation": 9.0})
    later.evaluation_site = Site("train.py", 7)
    later.loaders = [
        Loader("DataLoader", site, length=9, epochs=3, hashes=[1, 1], first_ms=[5.0, 6.0]),
        Loader("DataLoader", Site("train.py", 7), length=4, wait_ms=2.0, in_training=False),
    ]
    later.models = [Model("Net", site, evaluated_in_train_mode=Site("train.py", 8))]
    later.schedules = [Schedule("StepLR", site, steps=2)]
    found = with_lapse(seen, later, Lapse(4.0, 20, 2, ["validation"]))
    assert (found.steps, found.lanes_ms) == (50, {"evaluation": 0.0})
    train, held_out = found.loaders
    assert (train.epochs, train.first_ms, train.hashes) == (1, [5.0], [1, 1])
    assert held_out.wait_ms is None
    assert found.models[0].evaluated_in_train_mode
    assert (found.schedules[0].steps, found.schedules[0].in_lapse) == (0, 2)


@pytest.mark.slow
def test_what_comes_after_a_long_epoch_is_seen(tmp_path):
    (tmp_path / "engine").mkdir()
    (tmp_path / "engine" / "trainer.py").write_text(TRAINER)
    (tmp_path / "script.py").write_text(LONG)
    options = ("--seconds", "2", "--lapse", "60")
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
    lapse = seen.lapse
    assert lapse is not None, seen.notes
    assert lapse.epochs == 2
    assert lapse.parts == ["validation", "checkpoint", "schedule"]
    assert {Path(place).name: length for place, _, length in lapse.cut} == {
        "trainer.py:21": 100_001,
        "trainer.py:6": 90_000,
    }
    # The last batch is the ragged one, in each epoch.
    assert ran.stdout.count("last batch 3") >= 2
    assert "last batch 4" not in ran.stdout
    assert seen.models[0].evaluated_in_train_mode is not None
    assert seen.lanes_ms["evaluation"] == 0.0
    assert len(next(one for one in seen.loaders if one.in_training).hashes or []) >= 2
    assert not [*tmp_path.rglob("*.pyc")]
