"""A learning-rate rule in fit: the rates of each step, schedules, resume, and what is said."""

import json
import math
import signal

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from train_jobs import (
    StopAt,
    close,
    data,
    figures,
    network,
    plain_fit,
    quiet,
    same,
    same_state,
    saving,
    trainer,
)

import flatout
from flatout import LrRule
from flatout.errors import CheckpointError, DataError, ModelError
from flatout.train.callbacks import JsonLines
from flatout.train.signals import Interrupted

pytestmark = pytest.mark.usefixtures("one_thread")

# 150 samples in batches of 32: 5 steps an epoch.
STEPS = 5


class Multiplied(torch.optim.SGD):
    """Plain SGD with momentum whose rates are written down for each step, by parameter group."""

    def __init__(self, groups, rates):
        super().__init__(groups, lr=0.0, momentum=0.9)
        self.rates = iter(rates)

    def step(self, closure=None):
        for group, rate in zip(self.param_groups, next(self.rates), strict=True):
            group["lr"] = rate
        super().step(closure)


def groups_of(model):
    last = list(model[4].parameters())
    first = [p for part in model[:4] for p in part.parameters()]
    return [{"params": first, "lr": 0.05}, {"params": last, "lr": 0.02}]


def rates_of_schedule(make, every, epochs):
    """What a scheduler alone makes of the two rates, step by step."""
    optimizer = torch.optim.SGD(groups_of(network()), momentum=0.9)
    scheduler = make(optimizer)
    for _ in range(epochs):
        for _ in range(STEPS):
            yield [group["lr"] for group in optimizer.param_groups]
            optimizer.step()
            if every == "step":
                scheduler.step()
        if every == "epoch":
            scheduler.step()


SCHEDULES = {
    "none": (lambda o: lr_scheduler.LambdaLR(o, lambda step: 1.0), "step"),
    "cosine, per step": (lambda o: lr_scheduler.CosineAnnealingLR(o, 15, eta_min=1e-3), "step"),
    "one cycle, per step": (
        lambda o: lr_scheduler.OneCycleLR(o, 0.05, total_steps=15, cycle_momentum=False),
        "step",
    ),
    "exponential, per epoch": (lambda o: lr_scheduler.ExponentialLR(o, 0.5), "epoch"),
    "steps, per epoch": (lambda o: lr_scheduler.StepLR(o, 2), "epoch"),
}


@pytest.mark.parametrize(("make", "every"), SCHEDULES.values(), ids=SCHEDULES)
def test_each_step_has_the_rate_of_the_schedule_times_the_factor(make, every):
    """Bit for bit the steps of a loop in which all rates are written down."""
    factors = [1, 1.5, 2, 2.5, 3, 3.5, *[4] * 9]
    rates = [
        [rate * factor for rate in given]
        for given, factor in zip(rates_of_schedule(make, every, 3), factors, strict=True)
    ]
    x, y = data()
    theirs, ours = network(), network()
    torch.manual_seed(7)
    plain_fit(theirs, Multiplied(groups_of(theirs), rates), x, y, epochs=3)
    optimizer = torch.optim.SGD(groups_of(ours), momentum=0.9)
    job = trainer(
        ours,
        optimizer=optimizer,
        scheduler=make,
        schedule_every=every,
        lr_rule=LrRule("linear", reference_batch=8, warm_up_steps=6),
    )
    torch.manual_seed(7)
    job.fit((x, y), batch_size=32, epochs=3, progress=False)
    assert same(ours, theirs)


def test_plateaus_see_the_rates_without_the_rule():
    x, y = data()
    optimizer = torch.optim.SGD((model := network()).parameters(), lr=0.01)
    plateau = lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=10.0)
    job = trainer(model, optimizer=optimizer, scheduler=plateau, lr_rule=LrRule("linear", 8))
    job.fit((x, y), batch_size=32, epochs=2, progress=False)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.0001)
    assert job.loop.learning_rate == pytest.approx(0.0004)


@pytest.mark.parametrize("rule", [LrRule("sqrt", 32, warm_up=2), LrRule("none", 8), None])
def test_where_nothing_is_to_do_nothing_changes(rule):
    x, y = data()
    theirs, ours = network(), network()
    optimizers = [torch.optim.Adam(model.parameters(), lr=0.01) for model in (theirs, ours)]
    torch.manual_seed(7)
    plain_fit(theirs, optimizers[0], x, y)
    torch.manual_seed(7)
    job = trainer(ours, optimizer=optimizers[1], lr_rule=rule)
    history = job.fit((x, y), batch_size=32, epochs=2, progress=False)
    assert same(ours, theirs)
    assert same_state(*optimizers)
    scale = job.loop.stepper.lr_scale
    assert scale is None or not scale.changes
    assert len(history.notes) == (rule is not None)


def test_accumulated_batches_count_together():
    """As one batch of that size by hand: the epoch's 75 are two steps of 64 and 11."""
    x, y = data(samples=75)
    theirs, ours = network(dropout=0, norm=False), network(dropout=0, norm=False)
    plain_fit(theirs, torch.optim.SGD(theirs.parameters(), lr=0.2), x, y, batch_size=64)
    job = trainer(ours, optimizer="sgd", lr=0.1, accumulate=2, lr_rule=LrRule("linear", 32))
    history = job.fit((x, y), batch_size=32, epochs=2, progress=False)
    assert history.lr_scale.batch == 64
    assert close(ours, theirs)


def test_the_history_says_what_was_done(tmp_path):
    said = []
    job = flatout.Trainer(
        network(),
        optimizer="sgd",
        lr=0.1,
        lr_rule=LrRule("linear", reference_batch=8, warm_up=2),
        say=said.append,
    )
    history = job.fit(data(), batch_size=32, epochs=3, progress=False)
    words = (
        "learning rate 0.1 -> 0.4: linear rule for batch 32 instead of 8, warm-up over 2 epochs "
        "(10 steps)"
    )
    assert history.notes == [words]
    assert words in said
    assert words in history.summary()
    saved = json.loads(history.save(tmp_path / "history.json").read_text())
    assert saved["lr_scale"] == {
        "rule": "linear",
        "reference_batch": 8,
        "warm_up": 2,
        "batch": 32,
        "factor": 4.0,
        "warm_up_steps": 10,
    }


def test_what_was_never_tried_is_said_once(tmp_path):
    said = []
    job = flatout.Trainer(network(), optimizer="lars", lr=5.0, say=said.append)
    history = job.fit(data(), batch_size=32, epochs=2, progress=False)
    (note,) = history.notes
    assert note.startswith("5 steps an epoch, tried down to 39 (You et al. 2017: LARS")
    assert said.count(note) == 1
    assert history.lr_scale is None


def test_the_rate_of_each_step_is_logged(tmp_path):
    log = tmp_path / "log.jsonl"
    job = trainer(network(), optimizer="sgd", lr=0.1, lr_rule=LrRule("linear", 8, warm_up_steps=4))
    job.fit(data(), batch_size=32, epochs=1, progress=False, callbacks=[JsonLines(log, every=1)])
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    rates = [line["lr"] for line in lines if line["kind"] == "step"]
    assert rates == pytest.approx([0.175, 0.25, 0.325, 0.4, 0.4])


def test_an_error_names_the_rate_of_its_step():
    x, y = data()
    x[:] = math.inf
    job = trainer(network(), optimizer="sgd", lr=0.1, lr_rule=LrRule("linear", 8))
    with pytest.raises(flatout.errors.NumbersError, match=r"step 1, learning rate 0\.4"):
        job.fit((x, y), batch_size=32, progress=False)


RULE = LrRule("linear", 8, warm_up_steps=12)


class Interruptible:
    """A fit of three epochs with a warm-up over 12 steps, a scheduler and momentum."""

    def __init__(self, run=None, rule=RULE, optimizer="sgd"):
        self.said = []
        self.trainer = flatout.Trainer(
            network(),
            optimizer=optimizer,
            lr=0.05,
            scheduler=lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=15),
            lr_rule=rule,
            run=run,
            recipe=saving(),
            allow="exact",
            say=self.said.append,
        )

    def fit(self, resume=False, *callbacks, seed=7):
        torch.manual_seed(seed)
        self.history = self.trainer.fit(
            data(), batch_size=32, epochs=3, callbacks=callbacks, resume=resume, progress=False
        )
        return self


@pytest.mark.parametrize("optimizer", ["sgd", "lars", "lamb"])
def test_a_resume_in_the_middle_of_the_warm_up(tmp_path, optimizer):
    whole = Interruptible(optimizer=optimizer).fit(False, StopAt(0, quiet))
    first = Interruptible(tmp_path, optimizer=optimizer)
    with pytest.raises(Interrupted):
        first.fit(False, StopAt(7, lambda state: signal.raise_signal(signal.SIGTERM)))
    rest = Interruptible(tmp_path, optimizer=optimizer).fit(True, StopAt(0, quiet), seed=99)
    assert same(rest.trainer.model, whole.trainer.model)
    assert same_state(rest.trainer.optimizer, whole.trainer.optimizer)
    assert figures(rest.history) == figures(whole.history)
    assert rest.history.notes == whole.history.notes
    assert rest.history.lr_scale == whole.history.lr_scale
    assert (
        "the learning rate stays multiplied by 2.75: linear rule for batch 32 instead of 8, step 7 "
        "of 12 of the warm-up"
    ) in rest.said


@pytest.mark.parametrize("other", [None, LrRule("sqrt", 8), LrRule("linear", 16)])
def test_a_resume_with_another_rule_is_refused(tmp_path, other):
    Interruptible(tmp_path).fit()
    with pytest.raises(CheckpointError, match=r"  lr_rule\n +then: rule=linear"):
        Interruptible(tmp_path, other).fit(True)


def test_a_rule_that_changes_nothing_may_come_and_go(tmp_path):
    Interruptible(tmp_path, None).fit()
    Interruptible(tmp_path, LrRule("none", 8)).fit(True)


def test_a_resume_with_another_batch_is_refused(tmp_path):
    Interruptible(tmp_path).fit()
    with pytest.raises(DataError, match=r"batch size differ(.|\n)*warm_start"):
        Interruptible(tmp_path).trainer.fit(data(), batch_size=16, epochs=4, resume=True)


def test_each_fit_has_a_warm_up_of_its_own():
    job = trainer(network(), optimizer="sgd", lr=0.1, lr_rule=LrRule("linear", 8, warm_up=2))
    for _ in range(2):
        job.fit(data(), batch_size=32, epochs=1, progress=False)
        assert job.loop.learning_rate == pytest.approx(0.25)


def test_a_loop_of_ones_own():
    x, y = data()
    source = flatout.data.as_source((x, y), batch_size=32, seed=0)
    rates = [[0.1 * factor] for factor in [1, 1.25, 1.5, 1.75, 2]]
    theirs, ours = network(), network()
    torch.manual_seed(7)
    plain_fit(theirs, Multiplied(theirs.parameters(), rates), x, y, epochs=1)
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.1, momentum=0.9)

    def compute(batch):
        return nn.functional.cross_entropy(ours(batch.inputs), batch.targets)

    rule = LrRule("sqrt", 8, warm_up_steps=4)
    loop = flatout.Loop(allow="exact", lr_rule=rule, say=quiet)
    torch.manual_seed(7)
    loop.prepare(ours, optimizer, compute=compute, data=source)
    assert loop.learning_rate == 0.1
    for batch in loop.batches(source):
        loop.step(compute, batch)
    loop.close()
    assert same(ours, theirs)
    assert loop.learning_rate == 0.2
    assert loop.stepper.lr_scale.factor == 2
    assert loop.notes()[0].startswith("learning rate 0.1 -> 0.2: sqrt rule")


def test_without_data_the_batch_is_unknown():
    model = network()
    loop = flatout.Loop(lr_rule=LrRule("linear", 8), say=quiet)
    with pytest.raises(ModelError, match=r"needs the batch size(.|\n)*compute and data"):
        loop.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    loop.close()


def test_batches_that_come_ready_made():
    x, y = data()
    batches = [(x[at : at + 50], y[at : at + 50]) for at in range(0, 150, 50)]
    job = trainer(network(), optimizer="sgd", lr=0.1, lr_rule=LrRule("linear", 25, warm_up=2))
    history = job.fit(batches, epochs=1, progress=False)
    assert (history.lr_scale.batch, history.lr_scale.warm_up_steps) == (50, 6)


@pytest.mark.parametrize("given", ["linear", 256, {"rule": "linear"}])
def test_what_is_no_rule(given):
    with pytest.raises(ModelError, match=r"an lr_rule is a flatout\.LrRule, found"):
        flatout.Trainer(network(), lr_rule=given)


@pytest.mark.parametrize("name", ["lars", "lamb"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_lars_and_lamb_learn(name, precision):
    job = trainer(
        network(dropout=0),
        optimizer=name,
        lr=5.0 if name == "lars" else 0.02,
        allow="tolerant",
        recipe=flatout.Recipe().replace({"compute.precision": precision}),
    )
    history = job.fit(data(), batch_size=50, epochs=8, progress=False)
    losses = history.history["loss"]
    assert losses[-1] < 0.8 * losses[0]
