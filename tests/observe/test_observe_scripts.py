"""Scripts as they are, each in its own process: what is seen, and that nothing changes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import forked
from flatout.observe import Observation

TRAINING = """
import hashlib, sys, torch
from torch.utils.data import DataLoader, TensorDataset

def main():
    torch.manual_seed(0)
    x, y = torch.randn(256, 16), torch.randint(0, 4, (256,))
    layers = [torch.nn.Linear(16, 32), torch.nn.Dropout(0.2), torch.nn.Linear(32, 4)]
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.Adam(model.parameters())
    train = DataLoader(TensorDataset(x, y), 32, shuffle=True, num_workers=int(sys.argv[1]),
                       multiprocessing_context=sys.argv[2] if sys.argv[2:] else None)
    test = DataLoader(TensorDataset(x, y), 64)
    for epoch in range(2):
        model.train()
        for inputs, targets in train:
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step()
            total = loss.item()
        with torch.no_grad():
            correct = sum((model(inputs).argmax(1) == targets).sum() for inputs, targets in test)
    weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    print(hashlib.sha256(weights).hexdigest())

if __name__ == "__main__":
    main()
"""

LOOP = """
import torch; torch.manual_seed(0)
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
"""


def _python(*arguments, folder, **more):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        **more,
    )


def _forked(*arguments, folder):
    """The same of a script that loads torch."""
    return forked.run(arguments, folder, {**os.environ, "OMP_NUM_THREADS": "1"}, forked.TORCH)


def _observe(tmp_path: Path, source: str, *arguments: str, options=(), python=_forked):
    (tmp_path / "script.py").write_text(source)
    ran = python(
        "-m",
        "flatout.observe.start",
        tmp_path / "seen",
        *options,
        "script.py",
        *arguments,
        folder=tmp_path,
    )
    return ran, _seen(tmp_path)


def _seen(tmp_path: Path) -> Observation:
    return Observation.of(json.loads((tmp_path / "seen" / "rank-0.json").read_text()))


@pytest.mark.slow
def test_a_training_script_is_seen_and_gives_the_same_bits(tmp_path):
    ran, seen = _observe(tmp_path, TRAINING, "0", python=_python)
    alone = _python("script.py", "0", folder=tmp_path)

    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == alone.stdout
    assert (seen.ended, seen.steps, seen.framework) == ("done", 16, "torch")
    assert len(seen.step_ms) == 16
    assert seen.command == ["script.py", "0"]
    for lane in ("input", "forward", "backward", "optimizer", "evaluation"):
        assert seen.lanes_ms[lane] > 0
    training, evaluation = seen.loaders
    assert (training.in_training, evaluation.in_training) == (True, False)
    assert (training.batch_size, training.shuffles, training.epochs) == (32, True, 2)
    assert training.batch_bytes == 32 * (16 * 4 + 8)
    assert training.site.code == "for inputs, targets in train:"
    (optimizer,) = seen.optimizers
    assert (optimizer.steps, optimizer.backwards, optimizer.parameters) == (16, 1.0, 4)
    (model,) = seen.models
    assert model.evaluated_in_train_mode.code.startswith("correct = sum((model(inputs)")
    assert model.trained_in_eval_mode is None
    (item,) = [call for call in seen.calls if call.kind == "item"]
    assert item.site.code == "total = loss.item()"
    assert item.count == item.steps == 16
    assert seen.added_us_per_step > 0
    assert "us per step" in ran.stderr


@pytest.mark.slow
@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_workers_give_the_same_bits(tmp_path, context):
    ran, seen = _observe(tmp_path, TRAINING, "2", context)
    alone = _forked("script.py", "2", context, folder=tmp_path)

    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == alone.stdout
    assert seen.loaders[0].num_workers == 2
    assert len(seen.loaders[0].first_ms) == 2
    assert seen.loaders[0].sample_bytes == 16 * 4 + 8
    assert set(seen.loaders[0].lanes_ms) == {"read", "decode", "transform", "collate"}
    assert not list((tmp_path / "seen").glob(".workers*"))


def test_a_failing_script_is_told_as_python_tells_it(tmp_path):
    source = "def inner():\n    raise ValueError('wrong')\n\ninner()\n"
    ran, seen = _observe(tmp_path, source, python=_python)
    alone = _python("script.py", folder=tmp_path)

    assert (ran.returncode, ran.stderr) == (1, alone.stderr)
    assert seen.ended == "failed"
    assert seen.error == alone.stderr


FAILING = """
from flatout.observe import mistakes
from flatout.observe.loaders import SeenLoader
from flatout.observe.schedules import Schedules

def of_sets(*_):
    raise KeyError("samples")

def of_schedules(_):
    raise ValueError("no rate")

def of_ranks(_):
    raise IndexError("no sample")

mistakes.compare, Schedules.results = of_sets, of_schedules
SeenLoader.compare_with_others = of_ranks
for rows in torch.utils.data.DataLoader(torch.ones(6, 4), 2):
    model(rows).square().sum().backward()
    optimizer.step()
print("end")
"""


@pytest.mark.slow
def test_finders_that_fail_at_the_end_cost_no_more_than_what_they_find(tmp_path):
    ran, seen = _observe(tmp_path, LOOP + FAILING)
    assert (ran.returncode, ran.stdout) == (0, "end\n"), ran.stderr
    failed = [note for note in seen.notes if note.startswith("a look failed")]
    assert len(failed) == 3
    for error, note in zip(("IndexError", "ValueError", "KeyError"), failed, strict=True):
        assert f"is missing: {error}(" in note
    assert (seen.ended, seen.steps, seen.schedules) == ("done", 3, [])
    assert seen.switched_on == []  # not None: what comes between the two is there
    assert seen.models[0].site.code.startswith("model(rows)")
    assert seen.loaders[0].batch_size == 2


PLATEAUS = """
made = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
stepped = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
for step in range(4):
    loss = model(torch.ones(2, 4)).square().sum()
    loss.backward()
    optimizer.step()
    stepped.step(loss)
"""


@pytest.mark.slow
def test_schedules_that_wait_for_a_loss_are_counted_as_others_are(tmp_path):
    ran, seen = _observe(tmp_path, LOOP + PLATEAUS)
    assert ran.returncode == 0, ran.stderr
    made, stepped = seen.schedules
    assert (made.kind, made.steps, made.is_used) == ("ReduceLROnPlateau", 0, True)
    assert made.site.code.startswith("made = ")
    assert (stepped.kind, stepped.steps, stepped.first_after) == ("ReduceLROnPlateau", 4, None)


GONE = """
def train(kind, each):
    rates = torch.optim.lr_scheduler
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = getattr(rates, kind)(optimizer, 10)
    for step in range(30):
        model(torch.ones(2, 4)).square().sum().backward()
        optimizer.step()
        if each:
            scheduler.step()

train("CosineAnnealingLR", True)
train("StepLR", False)
train("CosineAnnealingWarmRestarts", True)
"""


@pytest.mark.slow
def test_schedules_that_are_gone_at_the_end_were_counted(tmp_path):
    """But for those whose class steps without torch's method."""
    ran, seen = _observe(tmp_path, LOOP + GONE)
    assert ran.returncode == 0, ran.stderr
    cosine, forgotten = seen.schedules
    assert (cosine.kind, cosine.steps, cosine.ends_after, cosine.made_for) == (
        "CosineAnnealingLR", 30, 10, 10,
    )  # fmt: skip
    assert (cosine.first_after, cosine.is_used) == (1, True)
    assert cosine.stepped_at.code.startswith("scheduler.step()")
    assert (forgotten.kind, forgotten.steps, forgotten.is_used) == ("StepLR", 0, True)


def test_an_exit_code_is_kept(tmp_path):
    ran, seen = _observe(tmp_path, "import sys; sys.exit(3)", python=_python)
    assert ran.returncode == 3
    assert seen.ended == "failed"
    assert "SystemExit: 3" in seen.error


def test_a_script_that_never_steps(tmp_path):
    source = "import sys; print(sys.argv, __name__)"
    ran, seen = _observe(tmp_path, source, "--steps", "7", python=_python)
    assert ran.stdout == "['script.py', '--steps', '7'] __main__\n"
    assert (seen.ended, seen.steps, seen.lanes_ms) == ("no steps", 0, {})


def test_torch_is_not_imported_for_a_script_that_does_without(tmp_path):
    ran, _ = _observe(tmp_path, "import sys; print('torch' in sys.modules)", python=_python)
    assert ran.stdout == "False\n"


@pytest.mark.slow
def test_enough_ends_the_script_before_what_follows_the_step(tmp_path):
    source = LOOP + (
        "for step in range(10_000):\n"
        "    model(torch.ones(2, 4)).sum().backward()\n"
        "    optimizer.step()\n"
        "    print(step)\n"
    )
    ran, seen = _observe(tmp_path, source, options=("--steps", "4"))
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.split() == ["0", "1", "2"]
    assert (seen.ended, seen.steps) == ("stopped", 4)


@pytest.mark.slow
def test_a_script_that_catches_everything_is_ended_all_the_same(tmp_path):
    source = LOOP + (
        "while True:\n"
        "    try:\n"
        "        model(torch.ones(2, 4)).sum().backward()\n"
        "        optimizer.step()\n"
        "    except BaseException:\n"
        "        print('caught')\n"
    )
    ran, seen = _observe(tmp_path, source, options=("--steps", "2"))
    assert (ran.returncode, ran.stdout) == (0, "caught\n")
    assert seen.ended == "stopped"


@pytest.mark.slow
def test_workers_do_not_stay_behind(tmp_path):
    source = TRAINING.replace("range(2)", "range(10_000)").replace(
        "total = loss.item()",
        "print(*[w.pid for w in __import__('multiprocessing').active_children()], flush=True)",
    )
    ran, seen = _observe(tmp_path, source, "2", options=("--steps", "5"))
    assert ran.returncode == 0, ran.stderr
    pids = {int(pid) for pid in ran.stdout.split()}
    assert len(pids) == 2
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    assert seen.ended == "stopped"


@pytest.mark.slow
def test_what_lies_before_a_step_is_the_hosts_and_each_optimizer_has_its_share(tmp_path):
    source = LOOP + (
        "import time\n"
        "class Slow(torch.optim.SGD):\n"
        "    def step(self, closure=None):\n"
        "        time.sleep(0.01)\n"
        "        super().step()\n"
        "other = torch.nn.Linear(4, 1)\n"
        "slow = Slow(other.parameters(), 0.1)\n"
        "for step in range(16):\n"
        "    model(torch.ones(2, 4)).sum().backward()\n"
        "    time.sleep(0.03)  # as a look at the gradients\n"
        "    optimizer.step()\n"
        "    other(torch.ones(2, 4)).sum().backward()\n"
        "    slow.step()\n"
    )
    _, seen = _observe(tmp_path, source)
    assert seen.lanes_ms["host"] > 29
    assert seen.lanes_ms["optimizer"] < seen.lanes_ms["host"]
    shares = [optimizer.step_share for optimizer in seen.optimizers]
    assert shares[0] < 0.5 < shares[1]
    assert sum(shares) == pytest.approx(1)


@pytest.mark.slow
def test_rounds_of_two_optimizers_and_accumulation(tmp_path):
    source = LOOP + (
        "other = torch.nn.Linear(4, 1)\n"
        "second = torch.optim.SGD(other.parameters(), 0.1)\n"
        "for step in range(6):\n"
        "    for part in range(4):\n"
        "        other(model(torch.ones(2, 4)).detach()).sum().backward()\n"
        "    second.step()\n"
        "    other(model(torch.ones(2, 4))).sum().backward()\n"
        "    optimizer.step()\n"
    )
    _, seen = _observe(tmp_path, source)
    assert seen.steps == 6
    assert [(o.steps, o.backwards) for o in seen.optimizers] == [(6, 4.0), (6, 1.0)]
    assert seen.lanes_ms["input"] is None
    assert any(note.startswith("input: ") for note in seen.notes)


@pytest.mark.slow
def test_a_slow_dataset_shows_as_input(tmp_path):
    source = LOOP + (
        "import time\n"
        "class Slow(torch.utils.data.Dataset):\n"
        "    def __len__(self):\n"
        "        return 16\n"
        "    def __getitem__(self, i):\n"
        "        time.sleep(0.1)\n"
        "        return torch.ones(4)\n"
        "for batch in torch.utils.data.DataLoader(Slow(), 2):\n"
        "    model(batch).sum().backward()\n"
        "    optimizer.step()\n"
    )
    _, seen = _observe(tmp_path, source)
    assert seen.lanes_ms["input"] >= 40
    assert max(seen.lanes_ms, key=lambda lane: seen.lanes_ms[lane] or 0) == "input"
    assert seen.loaders[0].dataset_site.code == "def __getitem__(self, i):"


@pytest.mark.slow
def test_a_module_runs_as_with_m(tmp_path):
    package = tmp_path / "job"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "train.py").write_text("import sys; print(__name__, __package__, sys.argv[1:])")
    ran = _python(
        "-m", "flatout.observe.start", "seen", "-m", "job.train", "--steps", "1", folder=tmp_path
    )
    assert ran.stdout == "__main__ job ['--steps', '1']\n"
    assert _seen(tmp_path).command == ["-m", "job.train", "--steps", "1"]


@pytest.mark.slow
def test_a_script_that_traps_signals(tmp_path):
    source = LOOP + (
        "import os, signal\n"
        "signal.signal(signal.SIGTERM, lambda *_: print('trapped'))\n"
        "for step in range(3):\n"
        "    model(torch.ones(2, 4)).sum().backward()\n"
        "    optimizer.step()\n"
        "os.kill(os.getpid(), signal.SIGTERM)\n"
    )
    ran, seen = _observe(tmp_path, source)
    assert (ran.returncode, ran.stdout, seen.ended) == (0, "trapped\n", "done")


# Steps in which nothing is compiled yet, after which hooks in C have taken over.
PLAIN_STEPS = """
for _ in range(int(sys.argv[1])):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.slow
@pytest.mark.parametrize("plain_steps", [0, pytest.param(8, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    "how", ["module", pytest.param("function", marks=pytest.mark.long), "break"]
)
def test_compiled_frames_are_kept(tmp_path, how, plain_steps):
    source = f"import sys{LOOP}{PLAIN_STEPS}" + (
        "from torch._dynamo.utils import counters\n"
        "compiled = torch.compile(model, backend='eager')\n"
        "@torch.compile(backend='eager')\n"
        "def function(x):\n"
        "    return model(x)\n"
        "@torch.compile(backend='eager')\n"
        "def breaks(x):\n"
        "    y = model(x)\n"
        "    float(y.sum())\n"
        "    return y * y.sum().item()\n"
        "call = {'module': compiled, 'function': function, 'break': breaks}[sys.argv[2]]\n"
        "for step in range(5):\n"
        "    call(torch.ones(2, 4)).sum().backward()\n"
        "    optimizer.step()\n"
        "    optimizer.zero_grad()\n"
        "print(dict(counters['frames']), dict(counters['stats']), model.weight.sum())\n"
    )
    ran, seen = _observe(tmp_path, source, str(plain_steps), how)
    alone = _forked("script.py", plain_steps, how, folder=tmp_path)
    assert ran.stdout == alone.stdout
    assert ran.stdout.startswith("{'total': ")
    assert seen.steps == plain_steps + 5
    assert seen.optimizers[0].backwards == 1
    # What a compiled function calls is out of sight.
    assert seen.models or (how != "module" and any(n.startswith("models: ") for n in seen.notes))


@pytest.mark.slow
@pytest.mark.parametrize("plain_steps", [0, pytest.param(8, marks=pytest.mark.long)])
def test_a_whole_compiled_step_keeps_its_graphs(tmp_path, plain_steps):
    source = f"import sys{LOOP}{PLAIN_STEPS}" + (
        "from torch._dynamo.utils import counters\n"
        "@torch.compile(backend='eager')\n"
        "def step(x):\n"
        "    optimizer.zero_grad()\n"
        "    model(x).sum().backward()\n"
        "    optimizer.step()\n"
        "for _ in range(5):\n"
        "    step(torch.ones(2, 4))\n"
        "print(dict(counters['stats']), sum(counters['graph_break'].values()))\n"
        "print(model.weight.sum())\n"
    )
    ran, _ = _observe(tmp_path, source, str(plain_steps))
    alone = _forked("script.py", plain_steps, folder=tmp_path)
    assert ran.stdout == alone.stdout
    assert "'unique_graphs': 2" in ran.stdout


FILES = (
    LOOP
    + """
import random, time, numpy
class Files(torch.utils.data.Dataset):
    def __len__(self):
        return 24
    def __getitem__(self, i):
        with open(__file__) as file:
            file.read()
        time.sleep(0.01)
        return torch.ones(4) * numpy.random.rand()

def seed(worker):
    numpy.random.seed(7)

if __name__ == "__main__":
    loader = torch.utils.data.DataLoader(
        Files(), 4, shuffle=True, num_workers=2, worker_init_fn=seed
    )
    for epoch in range(2):
        for batch in loader:
            model(batch).sum().backward()
            optimizer.step()
"""
)


@pytest.mark.slow
def test_workers_tell_of_files_lines_and_random_states(tmp_path):
    ran, seen = _observe(tmp_path, FILES)
    assert ran.returncode == 0, ran.stderr
    (loader,) = seen.loaders
    assert loader.opens_per_sample == 1
    assert loader.hot[0][0].code == "time.sleep(0.01)"
    assert loader.hot[0][1] > 0.5
    assert loader.lanes_ms["transform"] > 20
    assert len(loader.hashes) == 2
    assert loader.hashes[0] != loader.hashes[1]
    first, second = loader.worker_hashes
    assert first == second
    assert loader.worker_draws == "numpy"


@pytest.mark.slow
def test_batches_by_index_gradients_and_saves(tmp_path):
    source = """
import torch
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(1000, 4)
        self.head = torch.nn.Linear(4, 1)
        self.spare = torch.nn.Linear(1, 1)
    def forward(self, x):
        return self.head(self.table(x))
model = Net()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
data = torch.arange(1000)
for step in range(20):
    batch = data[torch.arange(10)]
    optimizer.zero_grad(set_to_none=False)
    model(batch).sum().backward()
    optimizer.step()
torch.save({"model": model.state_dict()}, "model.pt")
"""
    _, seen = _observe(tmp_path, source)
    calls = {call.kind: call for call in seen.calls}
    assert calls["index"].site.code == "batch = data[torch.arange(10)]"
    assert (calls["index"].count, calls["index"].steps) == (20, 20)
    assert calls["index"].detail == {"rows": [[15, 12, 15, 34]], "watched_steps": 6}
    assert calls["zero_grad"].detail == {"set_to_none": False}
    assert calls["save"].site.line == 19
    assert "model.table.weight" in seen.saved[0]["keys"]
    assert seen.lanes_ms["saving"] > 0
    assert seen.optimizers[0].sparse_share == pytest.approx(10 / 1000)
    assert seen.models[0].unused_parameters is True
    assert seen.models[0].inputs == [("[10], int64", 20)]


@pytest.mark.slow
def test_only_rows_picked_by_number_are_told_with_their_place(tmp_path):
    source = (
        LOOP
        + """
x = torch.randn(9, 4)
for step in range(20):
    rows = torch.arange(4)
    \u00e9, b = x[rows], x[x > 0]
    c, d = x[rows - step % 2], x[[1, 2]]
    e, f = model.weight[rows[:1]], x[rows, 0]
    optimizer.zero_grad()
    model(\u00e9).sum().backward()
    optimizer.step()
"""
    )
    _, seen = _observe(tmp_path, source)
    found = {call.site.code: call.detail["rows"] for call in seen.calls if call.kind == "index"}
    assert found.pop("\u00e9, b = x[rows], x[x > 0]") == [[9, 12, 9, 19]]
    assert list(found.values()) == [[], []]
    # Looking at them reads no number in the user's name.
    assert not [call for call in seen.calls if call.kind == "item"]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["eval", "train"])
def test_evaluation_and_training_in_the_other_mode(tmp_path, mode):
    source = LOOP + (
        "import sys\n"
        "model = torch.nn.Sequential(model, torch.nn.BatchNorm1d(4))\n"
        "rows = [(torch.ones(4) * i) for i in range(16)]\n"
        "train = torch.utils.data.DataLoader(rows, 2)\n"
        "test = torch.utils.data.DataLoader(rows, 4)\n"
        "for epoch in range(3):\n"
        "    for batch in train:\n"
        "        model(batch).sum().backward()\n"
        "        optimizer.step()\n"
        "    model.train(sys.argv[1] == 'train')\n"
        "    for batch in test:\n"
        "        model(batch).sum()\n"
    )
    _, seen = _observe(tmp_path, source, mode)
    (model,) = seen.models
    assert seen.steps == 24
    assert [loader.in_training for loader in seen.loaders] == [True, False]
    assert model.evaluated_every == (8 if mode == "eval" else None)
    if mode == "eval":
        assert model.evaluated_with_grad.line == 16
        assert model.trained_in_eval_mode.line == 12
        assert seen.lanes_ms["evaluation"] > 0
    else:
        assert model.evaluated_with_grad is None
        assert model.trained_in_eval_mode is None


@pytest.mark.slow
def test_keras_on_torch(tmp_path):
    source = (
        "import os\n"
        "os.environ['KERAS_BACKEND'] = 'torch'\n"
        "import keras, numpy\n"
        "model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])\n"
        "model.compile('adam', 'mse')\n"
        "x = numpy.ones((64, 4), 'float32')\n"
        "y = numpy.arange(64) // 32\n"
        "model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0)\n"
    )
    ran, seen = _observe(tmp_path, source)
    assert ran.returncode == 0, ran.stderr
    assert (seen.framework, seen.steps) == ("keras", 16)
    assert seen.optimizers[0].kind.endswith("Adam")
    assert seen.optimizers[0].elements == 5
    options = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999}
    assert seen.optimizers[0].options == pytest.approx(options)
    assert seen.optimizers[0].site.line == 8
    _assert_no_look_failed(seen)
    (loader,) = seen.loaders
    assert (loader.is_in_order, loader.shuffles, loader.label_runs) == (True, False, (2, 2, 64, 32))
    assert seen.models


def _assert_no_look_failed(seen: Observation) -> None:
    """Nor at the tensors without numbers that Keras finds shapes with."""
    assert not [note for note in seen.notes if "failed" in note]


KERAS_MODES = """
import os
os.environ['KERAS_BACKEND'] = 'torch'
import keras, numpy, torch
x = numpy.ones((64, 4), 'float32')

class Looks(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        self.model.predict(x[:4], verbose=0)

class Own(keras.layers.Layer):
    def __init__(self):
        super().__init__()
        self.inner = keras.layers.Dense(4)

    def call(self, x):
        return x + self.inner(x)

layers = [keras.Input((4,)), Own(), keras.layers.Dropout(0.5), keras.layers.Dense(1)]
model = keras.Sequential(layers)
"""


@pytest.mark.slow
def test_keras_layers_are_told_whether_they_train(tmp_path):
    source = KERAS_MODES + (
        "model.compile('adam', 'mse')\n"
        "model.fit(x, x[:, :1], batch_size=8, epochs=2, callbacks=[Looks()], verbose=0)\n"
    )
    ran, seen = _observe(tmp_path, source)
    assert ran.returncode == 0, ran.stderr
    _assert_no_look_failed(seen)
    (model,) = seen.models
    assert model.is_told
    assert model.layers["Dropout"] == 1
    # predict has left the module in eval mode, but fit says with each call that it trains.
    assert model.trained_in_eval_mode is None


@pytest.mark.slow
def test_a_keras_model_that_is_not_told_trains_without_dropout(tmp_path):
    source = KERAS_MODES + (
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.01)\n"
        "for _ in range(8):\n"
        "    loss = model(torch.from_numpy(x)).square().mean()\n"
        "    optimizer.zero_grad()\n"
        "    loss.backward()\n"
        "    optimizer.step()\n"
    )
    ran, seen = _observe(tmp_path, source)
    assert ran.returncode == 0, ran.stderr
    assert [model.trained_in_eval_mode.code for model in seen.models] == [
        "loss = model(torch.from_numpy(x)).square().mean()"
    ]


@pytest.mark.slow
def test_a_teacher_that_the_script_has_trained_before_is_seen_to_get_gradients(tmp_path):
    source = LOOP + (
        "for step in range(30):\n"
        "    optimizer.zero_grad()\n"
        "    model(torch.ones(2, 4)).sum().backward()\n"
        "    optimizer.step()\n"
        "class Student(torch.nn.Linear):\n"
        "    pass\n"
        "student = Student(4, 4)\n"
        "second = torch.optim.SGD(student.parameters(), 0.1)\n"
        "for step in range(30):\n"
        "    second.zero_grad()\n"
        "    rows = torch.ones(2, 4)\n"
        "    (student(rows) - model(rows)).square().sum().backward()\n"
        "    second.step()\n"
    )
    _, seen = _observe(tmp_path, source)
    (unused,) = seen.unused_gradients
    assert unused.fate == "kept"
    assert unused.called_at.line == source[: source.index(" - model(rows)")].count("\n") + 1
    assert unused.share > 0
    assert not [note for note in seen.notes if "a look failed" in note]
