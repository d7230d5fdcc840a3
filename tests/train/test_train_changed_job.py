"""A resume finds what the script has changed: it is taken over and said, or refused by name."""

from __future__ import annotations

import functools
import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, Dataset
from torchmetrics.classification import MulticlassF1Score
from train_jobs import CLASSES, data, network, quiet, same, same_state

import flatout
from flatout.errors import CheckpointError, DataError
from flatout.recipe import Recipe
from flatout.train.callbacks import BestCheckpoint, EarlyStopping

pytestmark = pytest.mark.usefixtures("one_thread")


def job(run, model=None, *, say=quiet, **options):
    options = {"optimizer": torch.optim.SGD, "lr": 0.1, "allow": "exact", **options}
    return flatout.Trainer(model or network(), run=run, say=say, **options)


def fit(trainer, source=None, epochs=1, **options):
    torch.manual_seed(3)
    given = {"batch_size": None if source is not None else 32, "progress": False, **options}
    return trainer.fit(data() if source is None else source, epochs=epochs, **given)


def refused(run, trainer, source=None, error=CheckpointError, **options):
    """What the resume says, having changed nothing."""
    before = {k: v.clone() for k, v in trainer.model.state_dict().items()}
    with pytest.raises(error) as caught:
        fit(trainer, source, 2, resume=True, **options)
    assert all(torch.equal(v, before[k]) for k, v in trainer.model.state_dict().items())
    words = str(caught.value)
    then = [line.split("then:")[1].strip() for line in words.splitlines() if "then:" in line]
    now = [line.split("now:")[1].strip() for line in words.splitlines() if "now:" in line]
    assert then
    assert all(a != b for a, b in zip(then, now, strict=True))
    return words


def classes(source: str) -> dict:
    """What a script of the user's defines, outside any installed package."""
    made: dict = {"__name__": "users_script", "torch": torch, "nn": nn, "Dataset": Dataset}
    exec(source, made)
    return made


NET = """
class Net(nn.Module):
    def __init__(self, drop=0.1):
        super().__init__()
        self.drop = drop
        self.body = nn.Linear(12, 3)
    def forward(self, x):
        return self.body(self.scaled(x))
    def scaled(self, x):
        return x * FACTOR
"""


def net(factor="2.0", **options):
    return classes(NET.replace("FACTOR", factor))["Net"](**options)


def smooth(output, target):
    return F.cross_entropy(output, target, label_smoothing=0.1)


def smoother(output, target):
    return F.cross_entropy(output, target, label_smoothing=0.2)


smoother.__name__ = smoother.__qualname__ = "smooth"

# What was, what is, and a line that says so.
LOSSES = {
    "by name": ({"loss": "cross_entropy"}, {"loss": "nll"}, "now:  nll"),
    "its code": ({"loss": smooth}, {"loss": smoother}, "then: smooth (code "),
    "an argument": (
        {"loss": nn.CrossEntropyLoss(label_smoothing=0.1)},
        {"loss": nn.CrossEntropyLoss(label_smoothing=0.2)},
        "label_smoothing=0.2",
    ),
    "weights of classes": (
        {"loss": nn.CrossEntropyLoss(torch.tensor([1.0, 2.0, 3.0]))},
        {"loss": nn.CrossEntropyLoss(torch.tensor([1.0, 2.0, 4.0]))},
        "  loss\n",
    ),
    "clip_norm": (
        {"clip_norm": 1.0},
        {"clip_norm": 2.0},
        "  clip_norm\n    then: 1.0\n    now:  2",
    ),
    "no clip_value": ({"clip_value": 1.0}, {}, "  clip_value\n    then: 1.0\n    now:  None"),
    "accumulate": ({"accumulate": 2}, {}, "  accumulate\n    then: 2\n    now:  1"),
    "metrics": ({"metrics": ["accuracy"]}, {"metrics": ["mse"]}, "  metrics\n    then: accuracy"),
    "an argument of a metric": (
        {"metrics": {"f1": MulticlassF1Score(CLASSES)}},
        {"metrics": {"f1": MulticlassF1Score(CLASSES, average="micro")}},
        "then: f1 (code ",
    ),
    "the optimizer's class": ({}, {"optimizer": torch.optim.Adam}, None),
    "an optimizer that needs more state": (
        {"optimizer": torch.optim.Adam},
        {"optimizer": functools.partial(torch.optim.Adam, amsgrad=True)},
        "  amsgrad of Adam\n    then: False\n    now:  True",
    ),
    "momentum where there was none": (
        {},
        {"optimizer": functools.partial(torch.optim.SGD, momentum=0.9)},
        "  momentum of SGD\n    then: 0\n    now:  0.9",
    ),
    "a rule for the rate": (
        {},
        {"lr_rule": flatout.LrRule("linear", reference_batch=16)},
        "  lr_rule\n    then: none\n    now:  rule=linear",
    ),
    "when the schedule steps": (
        {"scheduler": lambda o: lr_scheduler.StepLR(o, 2)},
        {"scheduler": lambda o: lr_scheduler.StepLR(o, 2), "schedule_every": "epoch"},
        "  schedule_every\n    then: step\n    now:  epoch",
    ),
    "a schedule": (
        {},
        {"scheduler": lambda o: lr_scheduler.StepLR(o, 2)},
        "  scheduler\n    then: none\n    now:  StepLR",
    ),
}


@pytest.mark.parametrize(("then", "now", "words"), LOSSES.values(), ids=LOSSES)
def test_what_decides_the_result_is_refused(tmp_path, then, now, words):
    fit(job(tmp_path, **then))
    if words is None:
        with pytest.raises(CheckpointError, match=r"optimizer is SGD with .*found Adam"):
            fit(job(tmp_path, **now), epochs=2, resume=True)
        return
    said = refused(tmp_path, job(tmp_path, **now))
    assert words in said
    assert "warm_start" in said
    assert len(fit(job(tmp_path, **then), epochs=2, resume=True).epochs) == 2


MODELS = {
    "an argument of a layer": (lambda: network(), lambda: network(dropout=0.5), "p=0.5"),
    "another layer without weights": (
        lambda: nn.Sequential(nn.Linear(12, 3), nn.ReLU()),
        lambda: nn.Sequential(nn.Linear(12, 3), nn.GELU()),
        "  model: 1\n    then: ReLU",
    ),
    "code": (net, lambda: net("3.0"), "  model: the model\n    then: Net(drop=0.1) code "),
    "an argument": (net, lambda: net(drop=0.2), "now:  Net(drop=0.2) code "),
    "a frozen layer": (net, lambda: frozen(net()), "not trained: weight, bias"),
}


def frozen(model):
    for parameter in model.body.parameters():
        parameter.requires_grad_(False)
    return model


@pytest.mark.parametrize(("then", "now", "words"), MODELS.values(), ids=MODELS)
def test_another_model_with_the_same_weights_is_refused(tmp_path, then, now, words):
    def given(model):
        # All of its parameters, also those that are not trained.
        return {"optimizer": torch.optim.SGD(model.parameters(), lr=0.1), "lr": None}

    old, new = then(), now()
    fit(job(tmp_path, old, **given(old)))
    assert words in refused(tmp_path, job(tmp_path, new, **given(new)))


DATASET = """
class Noisy(Dataset):
    def __init__(self, x, y, size=1):
        self.x, self.y, self.size = x, y, size
    def __len__(self):
        return len(self.x)
    def __getitem__(self, at):
        return self.x[at] * FACTOR, self.y[at]
"""


def noisy(factor="1.0", samples=None, **options):
    return classes(DATASET.replace("FACTOR", factor))["Noisy"](*(samples or data()), **options)


def collate(samples):
    return torch.utils.data.default_collate(samples)


def pipeline(*, rows=lambda x, y: (x, y), batches=lambda x, y: (x, y), keep=lambda x, y: True):
    x, y = data()
    source = flatout.data.arrays(x, y).map(rows).filter(keep)
    return source.shuffle(1).batch(32).map(batches)


def other_row(samples):
    x, y = samples
    x = x.clone()
    x[71] += 1e-6
    return x, y


DATA = {
    "one value of an array": (data, lambda: other_row(data()), "content "),
    "labels of an array": (data, lambda: (data()[0], data()[1].flip(0)), "content "),
    "a function of samples": (
        pipeline,
        lambda: pipeline(rows=lambda x, y: (x * 2, y)),
        "map lambda, line",
    ),
    "a function of batches": (
        pipeline,
        lambda: pipeline(batches=lambda x, y: (x * 2, y)),
        "map lambda, line",
    ),
    "a filter": (pipeline, lambda: pipeline(keep=lambda x, y: y > -1), "filter lambda, line"),
    "what a last batch is": (
        lambda: flatout.data.arrays(*data()).shuffle(1).batch(32),
        lambda: flatout.data.arrays(*data()).shuffle(1).batch(32, last="pad"),
        "last=pad",
    ),
    "a Dataset's code": (noisy, lambda: noisy("2.0"), "content "),
    "a Dataset's argument": (noisy, lambda: noisy(size=2), "content "),
    "a Dataset's arrays": (noisy, lambda: noisy(samples=other_row(data())), "content "),
    "a DataLoader's collate_fn": (
        lambda: DataLoader(noisy(), batch_size=32),
        lambda: DataLoader(noisy(), batch_size=32, collate_fn=collate),
        "content ",
    ),
    "a generator's code": (
        lambda: lambda: iter([data()]),
        lambda: lambda: iter([data(seed=1)]),
        "content ",
    ),
}


@pytest.mark.parametrize(("then", "now", "words"), DATA.values(), ids=DATA)
def test_other_data_of_the_same_shape_are_refused(tmp_path, then, now, words):
    size = {"batch_size": 32} if isinstance(then(), (tuple, Dataset)) else {}
    fit(job(tmp_path), then(), **size)
    said = refused(tmp_path, job(tmp_path), now(), DataError, **size)
    assert words in said
    assert len(fit(job(tmp_path), then(), 2, resume=True, **size).epochs) == 2


# -- what is taken over ------------------------------------------------------------------------


class SetRate(flatout.Callback):
    """Sets options of the optimizer before an epoch, as a plain loop would."""

    def __init__(self, epoch, **options):
        self.epoch, self.options = epoch, options

    def on_epoch_start(self, state):
        if state.epoch == self.epoch:
            state.trainer.optimizer.param_groups[0].update(self.options)

    def state_dict(self):
        return {}


@pytest.mark.parametrize(
    "options",
    [{"lr": 0.02}, {"weight_decay": 0.1, "betas": (0.8, 0.99)}, {"lr": 0.02, "eps": 1e-5}],
)
def test_new_numbers_of_the_optimizer_hold_from_the_next_step(tmp_path, options):
    def adam(**more):
        return functools.partial(torch.optim.Adam, **{"lr": 0.01, **more})

    whole, said = job(None, optimizer=adam(), lr=None), []
    fit(whole, epochs=3, callbacks=[SetRate(1, **options)])
    torch.manual_seed(3)
    fit(job(tmp_path, optimizer=adam(), lr=None), epochs=1)
    rest = job(tmp_path, optimizer=adam(**options), lr=None, say=said.append)
    fit(rest, epochs=3, resume=True)
    assert same(rest.model, whole.model)
    assert same_state(rest.optimizer, whole.optimizer)
    taken = said[1]
    assert taken.startswith("changed since the checkpoint, and taken over:\n  epochs\n")
    for name, value in options.items():
        words = "learning rate" if name == "lr" else name
        now = list(value) if isinstance(value, tuple) else value
        assert f"  {words} of Adam\n" in taken
        assert f"    now:  {now}" in taken
    # What was taken over is what the next checkpoint is compared with.
    again = job(tmp_path, optimizer=adam(**options), lr=None, say=(quiet_again := []).append)
    fit(again, epochs=3, resume=True)
    assert len(quiet_again) == 1


def test_a_rate_that_a_callback_had_set_stays(tmp_path):
    whole = job(None)
    fit(whole, epochs=3, callbacks=[SetRate(0, lr=0.02)])
    first = job(tmp_path)
    fit(first, epochs=1, callbacks=[SetRate(0, lr=0.02)])
    # In another process, and in the same, where the optimizer has the callback's rate.
    rest = job(tmp_path)
    fit(rest, epochs=2, callbacks=[SetRate(0, lr=0.02)], resume=True)
    assert rest.optimizer.param_groups[0]["lr"] == 0.02
    fit(rest, epochs=3, callbacks=[SetRate(0, lr=0.02)], resume=True)
    assert same(rest.model, whole.model)


class Reciprocal(lr_scheduler.LRScheduler):
    """A schedule of the user's own that counts for itself."""

    def __init__(self, optimizer):
        self.asked = 0
        super().__init__(optimizer)

    def get_lr(self):
        self.asked += 1
        return [rate / (1 + self.last_epoch) for rate in self.base_lrs]


@pytest.mark.parametrize(
    "schedule",
    [
        None,
        Reciprocal,
        lambda o: Halved(o),
        lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0, threshold=9),
    ],
    ids=["a callback", "by a formula", "unknown", "a plateau"],
)
def test_a_fit_twice_in_a_process_and_then_in_another_is_one_job(tmp_path, schedule):
    """What the first has left of rates and counters is not what the job was given."""

    def options():
        return {"callbacks": [SetRate(0, lr=0.02)] if schedule is None else []}

    whole = job(None, scheduler=schedule)
    fit(whole, epochs=4, **options())
    first = job(tmp_path, scheduler=schedule)
    fit(first, epochs=2, **options())
    fit(first, epochs=3, **options(), resume=True)
    said = []
    other = job(tmp_path, scheduler=schedule, say=said.append)
    fit(other, epochs=4, **options(), resume=True)
    assert "rate" not in said[1]
    assert other.optimizer.param_groups[0]["lr"] == whole.optimizer.param_groups[0]["lr"]
    assert same(other.model, whole.model)


SCHEDULES = {
    "cosine": lambda o, t=20: lr_scheduler.CosineAnnealingLR(o, t, eta_min=0.001),
    "steps": lambda o, t=3: lr_scheduler.StepLR(o, t),
    "a function": lambda o, t=9: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step / t)),
    "one cycle": lambda o, t=40: lr_scheduler.OneCycleLR(o, o.param_groups[0]["lr"], total_steps=t),
    "a sequence": lambda o, t=4: lr_scheduler.SequentialLR(
        o,
        [lr_scheduler.LinearLR(o, total_iters=3), lr_scheduler.CosineAnnealingWarmRestarts(o, t)],
        milestones=[3],
    ),
    "a chain": lambda o, t=4: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, total_iters=t), lr_scheduler.ExponentialLR(o, 0.9)], o
    ),
}


QUICK = ("cosine", "a sequence")


class Rates(flatout.Callback):
    """The rate and momentum after each step."""

    def __init__(self):
        self.seen = []

    def on_step(self, state):
        group = state.trainer.optimizer.param_groups[0]
        self.seen.append((group["lr"], group["momentum"]))

    def state_dict(self):
        return {}


@pytest.mark.parametrize("changed", ["the base rate", "an argument", "nothing"])
@pytest.mark.parametrize(
    "schedule",
    [
        pytest.param(made, id=name, marks=[] if name in QUICK else pytest.mark.slow)
        for name, made in SCHEDULES.items()
    ],
)
def test_a_changed_schedule_goes_on_as_if_it_had_been_there_from_the_start(
    tmp_path, schedule, changed
):
    def made(run, lr=0.1, say=quiet, **arguments):
        optimizer = functools.partial(torch.optim.SGD, momentum=0.9)
        return job(
            run, optimizer=optimizer, lr=lr, scheduler=lambda o: schedule(o, **arguments), say=say
        )

    new = {"the base rate": {"lr": 0.04}, "an argument": {"t": 17}, "nothing": {}}[changed]
    whole, rest, said = Rates(), Rates(), []
    fit(made(None, **new), epochs=3, callbacks=[whole])
    fit(made(tmp_path), epochs=1, callbacks=[Rates()])
    resumed = made(tmp_path, **new, say=said.append)
    fit(resumed, epochs=3, callbacks=[rest], resume=True)
    assert rest.seen == whole.seen[5:]
    assert len(rest.seen) == 10
    names = [line for line in said[1].splitlines() if line.startswith("  ") and line[2] != " "]
    assert ("  learning rate of SGD" in names) == (changed == "the base rate")
    assert (len(names) > 1) == (changed != "nothing")


def test_a_schedule_that_is_shorter_than_what_was_trained_is_refused(tmp_path):
    fit(job(tmp_path, scheduler=SCHEDULES["one cycle"]))
    shorter = job(tmp_path, scheduler=lambda o: SCHEDULES["one cycle"](o, 4))
    with pytest.raises(CheckpointError, match=r"(?s)OneCycleLR.*step 5.*long enough"):
        fit(shorter, epochs=2, resume=True)


def test_a_plateaus_reductions_are_kept_under_a_new_rate(tmp_path):
    def made(lr, factor, say=quiet):
        def plateau(optimizer):
            return lr_scheduler.ReduceLROnPlateau(optimizer, factor=factor, patience=0, threshold=9)

        return job(tmp_path, lr=lr, scheduler=plateau, say=say)

    first, said = made(0.1, 0.5), []
    fit(first, epochs=2)
    assert first.optimizer.param_groups[0]["lr"] == 0.025
    rest = made(0.4, 0.1, said.append)
    fit(rest, epochs=3, resume=True)
    assert rest.optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * 0.1)
    assert "  learning rate of SGD\n    then: 0.1\n    now:  0.4" in said[1]
    assert "  factor of ReduceLROnPlateau\n    then: 0.5\n    now:  0.1" in said[1]


class Halved:
    """A schedule of the user's own."""

    def __init__(self, optimizer):
        self.optimizer = optimizer
        self.steps = 0

    def step(self):
        self.steps += 1
        if self.steps == 3:
            self.optimizer.param_groups[0]["lr"] /= 2

    def state_dict(self):
        return {"steps": self.steps}

    def load_state_dict(self, state):
        self.steps = state["steps"]


def test_a_new_rate_under_a_schedule_that_nothing_is_known_of_is_refused(tmp_path):
    fit(job(tmp_path, scheduler=Halved))
    assert "learning rate of SGD" in refused(tmp_path, job(tmp_path, scheduler=Halved, lr=0.2))
    rest = job(tmp_path, scheduler=Halved)
    fit(rest, epochs=2, resume=True)
    assert rest.optimizer.param_groups[0]["lr"] == 0.05


def test_what_else_may_change_is_taken_over_and_said(tmp_path):
    def stopping(patience, monitor="loss"):
        return EarlyStopping(monitor, patience=patience)

    options = {"validation_data": data(seed=1)}
    fit(job(tmp_path, metrics=["accuracy"]), callbacks=[stopping(5)], **options)
    said, callback = [], stopping(7)
    rest = job(tmp_path, metrics=["accuracy"], say=said.append)
    fit(rest, epochs=2, callbacks=[callback], validation_data=data(seed=2), resume=True)
    assert callback.patience == 7
    taken = said[1]
    assert "  epochs\n    then: 1\n    now:  2" in taken
    assert "  arguments of callback 1, EarlyStopping\n    then: monitor=loss" in taken
    assert "patience=5" in taken
    assert "patience=7" in taken
    assert "  validation data\n    then: 150 samples" in taken
    # The best of another figure is none.
    said.clear()
    callback = stopping(7, "val_accuracy")
    rest = job(tmp_path, metrics=["accuracy"], say=said.append)
    fit(rest, epochs=3, callbacks=[callback], validation_data=data(seed=2), resume=True)
    assert callback.best_epoch == 3
    assert any("val_accuracy" in line and "begins" in line for line in said)


def test_a_best_checkpoint_of_another_figure_is_refused(tmp_path):
    def options(monitor):
        return {"callbacks": [BestCheckpoint(monitor)]}

    fit(job(tmp_path, metrics=["accuracy"]), **options("loss"))
    trainer = job(tmp_path, metrics=["accuracy"])
    said = refused(tmp_path, trainer, **options("accuracy"))
    assert "their scores\n    then: loss (min)\n    now:  accuracy (max)" in said


def test_settings_that_are_no_longer_asked_for_are_said(tmp_path):
    asked = Recipe(save={"every": 2}, compute={"precision": "bf16"})
    fit(job(tmp_path, recipe=asked, allow="tolerant"))
    said = []
    fit(job(tmp_path, allow="tolerant", say=said.append), epochs=2, resume=True)
    kept = "kept from the checkpoint, though not asked for now: compute.precision=bf16, "
    assert said[0].startswith(kept)
    assert "save.every=2" in said[0]


def test_another_ceiling_has_the_settings_decided_again(tmp_path, monkeypatch):
    asked = Recipe(compute={"precision": "bf16"})
    fit(job(tmp_path, recipe=asked, allow="tolerant"))
    said = []
    rest = job(tmp_path, allow="exact", say=said.append)
    fit(rest, epochs=2, resume=True)
    assert "settings are decided again, with allow=exact" in said
    assert rest.resolved.compute.precision == "fp32"


# -- a loop of one's own -------------------------------------------------------------------------


def loop_fit(run, *, factor=1.0, lr=0.1, epochs=1, resume=False, clip_norm=None, say=quiet):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    scheduler = lr_scheduler.StepLR(optimizer, 2)
    source = flatout.data.arrays(*data()).shuffle(1).batch(32)

    def compute(batch):
        return factor * F.cross_entropy(model(batch.inputs), batch.targets)

    loop = flatout.Loop(run=run, resume=resume, clip_norm=clip_norm, allow="exact", say=say)
    try:
        loop.prepare(model, optimizer, scheduler, compute=compute, data=source)
        for _ in loop.epochs(epochs):
            for batch in loop.batches(source):
                loop.step(compute, batch)
            scheduler.step()
        loop.save()
    finally:
        loop.close()
    return optimizer


def test_a_loop_compares_its_job_too(tmp_path):
    loop_fit(tmp_path)
    with pytest.raises(CheckpointError, match=r"  compute\n +then: .*compute \(code "):
        loop_fit(tmp_path, factor=2.0, resume=True)
    with pytest.raises(CheckpointError, match=r"  clip_norm\n +then: None\n +now:  1.0"):
        loop_fit(tmp_path, clip_norm=1.0, resume=True)
    said = []
    optimizer = loop_fit(tmp_path, lr=0.2, epochs=3, resume=True, say=said.append)
    assert "  learning rate of SGD\n    then: 0.1\n    now:  0.2" in said[1]
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.02)


@pytest.mark.slow
def test_the_same_script_is_the_same_job_in_another_process(tmp_path):
    """Sets, which have another order in each process, are the same; so are paths."""
    script = tmp_path / "job.py"
    script.write_text(
        """
import sys, torch, flatout
from torch import nn
WORDS = {"a", "b", "c", "d", "e"}
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(12, 3)
    def forward(self, x):
        if "x" in {"k", "l", "m", "n"}:
            return x
        return self.body(x)
def chosen(words=frozenset({"o", "p", "q"})):
    def f(x, y):
        return (x if str(y) in {"r", "s", "t"} or words else x * 2), y
    return f
torch.manual_seed(0)
x, y = torch.randn(64, 12), torch.arange(64) % 3
def loss(output, target):
    return nn.functional.cross_entropy(output, target) * len(WORDS)
source = flatout.data.arrays(x, y).map(chosen()).batch(16)
trainer = flatout.Trainer(Net(), loss=loss, run=sys.argv[1], allow="exact")
trainer.fit(source, epochs=int(sys.argv[2]), resume=True, progress=False)
"""
    )
    for seed, epochs in (("1", "1"), ("2", "2")):
        command = [sys.executable, str(script), str(tmp_path / "run"), epochs]
        done = subprocess.run(
            command, env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
    assert "resumed step 4" in done.stdout + done.stderr
