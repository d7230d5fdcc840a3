import copy
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from torch import nn
from train_jobs import CLASSES, Interpreted, data, network, quiet

import flatout
from flatout.errors import FlatoutError
from flatout.recipe import Parity, Recipe
from flatout.train import explanation
from flatout.train import fit as fit_module
from flatout.train.compute import ModelCompute
from flatout.train.graphs import capture, capture_child
from flatout.train.terms import Terms
from flatout.train.tuning import compile_trial as auto_capture

ADAM = partial(torch.optim.Adam, lr=0.01)
SGD = partial(torch.optim.SGD, lr=0.05, momentum=0.9)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FLATOUT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(explanation, "machine_rates", lambda *machine: None)  # takes seconds


@pytest.fixture
def interpreted(monkeypatch):
    def load(number):
        graph = Interpreted.graphs[number]
        module = capture_child.module_of(graph.code, graph.constants)
        return lambda inputs: calls.append(1) or module(*inputs)

    calls = []
    monkeypatch.setattr(Interpreted, "graphs", [])
    monkeypatch.setattr(capture, "Compiling", Interpreted)
    monkeypatch.setattr(capture, "loaded", load)
    return calls


def net(norm=True):
    """No bias before BatchNorm: its gradient is rounding alone, which Adam makes whole steps of."""
    torch.manual_seed(0)
    norms = [nn.BatchNorm1d(16)] if norm else []
    return nn.Sequential(nn.Linear(12, 16, bias=False), *norms, nn.ReLU(), nn.Linear(16, CLASSES))


def job(
    model, *, optimizer=ADAM, captured="on", loss="cross_entropy", threads=1, say=quiet, **options
):
    recipe = Recipe(
        compute={
            "capture": captured,
            **dict.fromkeys(("compile", "rewrites", "fused_norms", "fused_optimizer"), "off"),
            "precision": "fp32",
            "fp32_operators": "off",
            "matmul_precision": "highest",
            "memory_format": "contiguous",
        },
        memory={"allocator": "default"},
        process={"threads": threads},
    )
    options = {"allow": "exact", "metrics": ["accuracy"], **options}
    terms = options.pop("terms", Terms(ask_every=1))
    made = flatout.Trainer(model, loss=loss, optimizer=optimizer, recipe=recipe, say=say, **options)
    made.terms = terms
    return made


def fitted(model, epochs=10, samples=150, *, x_y=None, callbacks=(), **options):
    """A fit of five steps an epoch, the last of which is of another size where 150 samples are."""
    trainer = job(model, **options)
    x, y = x_y or data(samples=samples)
    history = trainer.fit((x, y), batch_size=32, epochs=epochs, progress=False, callbacks=callbacks)
    return trainer, history


def state_of(trainer):
    optimizer = trainer.optimizer.state_dict()["state"]
    return {
        **trainer.model.state_dict(),
        **{f"{p}.{n}": v for p, state in optimizer.items() for n, v in state.items()},
    }


def check_alike(ours, theirs, within=1e-4):
    for (name, a), b in zip(state_of(ours).items(), state_of(theirs).values(), strict=True):
        if torch.is_tensor(a):
            assert torch.allclose(a, b, atol=within, rtol=within, equal_nan=True), name


@pytest.mark.parametrize(
    "optimizer",
    [
        ADAM,
        partial(torch.optim.Adam, lr=0.01, weight_decay=0.1, amsgrad=True, fused=True),
        partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1, betas=(0.8, 0.9)),
        SGD,
        partial(torch.optim.SGD, lr=0.05),
        partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    ],
)
def test_captured_steps_are_those_of_torch(optimizer, interpreted):
    plain, by_hand = fitted(net(), optimizer=optimizer, captured="off")
    ours, history = fitted(net(), optimizer=optimizer)
    assert len(interpreted) == 4 * 10 - 2  # all whole batches but the first two
    check_alike(ours, plain)
    for a, b in zip(history.epochs, by_hand.epochs, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-4)
        assert a["accuracy"] == pytest.approx(b["accuracy"], abs=0.02)
    assert any("one compiled graph" in note for note in history.notes)


def test_a_schedule_and_clipping_go_on(interpreted):
    options = {
        "optimizer": SGD,
        "scheduler": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.2, total_steps=60),
        "clip_norm": 0.5,
        "clip_value": 0.1,
    }
    plain, _ = fitted(net(), captured="off", **options)
    ours, _ = fitted(net(), **options)
    assert interpreted
    check_alike(ours, plain)
    assert ours.optimizer.param_groups[0]["lr"] == plain.optimizer.param_groups[0]["lr"]


@pytest.mark.parametrize(
    "loss", [nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 0.5])), "mse", nn.SmoothL1Loss()]
)
def test_losses(loss, interpreted):
    x, y = data()
    if loss == "mse" or isinstance(loss, nn.SmoothL1Loss):
        y = nn.functional.one_hot(y, CLASSES).float()
    options = {"loss": loss, "x_y": (x, y), "metrics": []}
    plain, by_hand = fitted(net(), captured="off", **options)
    ours, history = fitted(net(), **options)
    assert interpreted
    check_alike(ours, plain)
    assert history.epochs[-1]["loss"] == pytest.approx(by_hand.epochs[-1]["loss"], rel=1e-4)


class Attends(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True)
        self.head = nn.Linear(4, CLASSES)

    def forward(self, x):
        return self.head(self.block(x.unflatten(1, (3, 4))).mean(1))


def test_attention_that_drops_nothing(interpreted):
    def fit(captured):
        torch.manual_seed(0)
        return fitted(Attends(), captured=captured, optimizer=SGD, epochs=4)[0]

    plain, ours = fit("off"), fit("on")
    assert interpreted
    check_alike(ours, plain)


def test_weights_of_classes(interpreted):
    def fit(captured):
        trainer = job(net(), captured=captured)
        trainer.fit(data(), batch_size=32, epochs=5, progress=False, class_weight={1: 3.0})
        return trainer

    plain, ours = fit("off"), fit("on")
    assert interpreted
    check_alike(ours, plain)


class Interrupt(flatout.Callback):
    def __init__(self, change, at):
        self.change, self.at, self.n = change, at, 0

    def on_epoch_end(self, state):
        self.n += 1
        if self.n == self.at:
            self.change(state)


def poison_nan(x, y):
    x[70] = float("nan")


def poison_label(x, y):
    y[70] = CLASSES + 40


@pytest.mark.parametrize(
    ("poison", "told", "optimizer"),
    [(poison_nan, "sample 70", ADAM), (poison_nan, "sample 70", SGD), (poison_label, "43", ADAM)],
)
def test_bad_numbers_in_a_captured_step_are_those_of_the_eager_one(
    poison, told, optimizer, interpreted
):
    """NaN, and a label that is in no class: the same error, and weights and statistics alike."""

    def fit(captured):
        x, y = data(samples=160)
        trainer = job(net(), captured=captured, optimizer=optimizer)
        change = Interrupt(lambda state: poison(x, y), 3)
        with pytest.raises(FlatoutError) as raised:
            trainer.fit((x, y), batch_size=32, epochs=4, progress=False, callbacks=[change])
        return trainer, raised.value

    theirs, expected = fit("off")
    ours, found = fit("on")
    made = ours.loop.step_count
    assert made == theirs.loop.step_count >= 15
    assert len(interpreted) == made - 2 + 1  # the first two, and the bad one
    assert type(found) is type(expected)
    assert str(found) == str(expected)
    assert told in str(found)
    check_alike(ours, theirs)


def test_an_id_in_no_table_is_named_in_a_captured_step(interpreted):
    def fit(captured):
        x, y = torch.arange(150)[:, None] % 20, data()[1]
        model = nn.Sequential(nn.Embedding(20, 8), nn.Flatten(), nn.Linear(8, CLASSES))
        change = Interrupt(lambda state: x.__setitem__(70, 31), 3)
        with pytest.raises(FlatoutError) as raised:
            fitted(model, captured=captured, x_y=(x, y), epochs=4, callbacks=[change])
        return str(raised.value)

    assert fit("on") == fit("off")
    assert len(interpreted) > 5


def test_what_changes_meanwhile_is_followed(interpreted):
    """A layer is frozen, weights are replaced, and the optimizer's state is loaded again."""

    def replace(state):
        model = state.trainer.model
        model[0].weight.data = model[0].weight.data.clone() * 0.5

    def load(state):
        optimizer = state.trainer.optimizer
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))

    def momentum(state):
        state.trainer.model[1].momentum = 0.5

    def fit(captured):
        changes = [Interrupt(replace, 3), Interrupt(load, 5), Interrupt(momentum, 7)]
        return fitted(net(), captured=captured, callbacks=changes)[0]

    plain, ours = fit("off"), fit("on")
    assert len(Interpreted.graphs) == 2
    check_alike(ours, plain)


def test_a_resume_goes_on(interpreted, tmp_path):
    plain, _ = fitted(net(), captured="off", epochs=8)
    fitted(net(), epochs=4, run=tmp_path / "run")
    ours = job(net(), run=tmp_path / "run")
    ours.fit(data(), batch_size=32, epochs=8, progress=False, resume=True)
    assert len(Interpreted.graphs) == 2
    check_alike(ours, plain)


def thawing(optimizer, at):
    """A net whose last layer trains from some epoch on, and options of its fit."""
    model = net()
    made = optimizer(model.parameters())
    model[-1].requires_grad_(False)
    return model, {"optimizer": made, "callbacks": [Thaw(at)], "samples": 160}


class Thaw(flatout.Callback):
    """The last layer trains from some epoch on."""

    def __init__(self, at):
        self.at = at

    def on_epoch_start(self, state):
        state.trainer.model[-1].requires_grad_(state.epoch >= self.at)


@pytest.mark.parametrize("optimizer", [ADAM, SGD])
def test_a_layer_that_trains_later_has_made_fewer_steps(optimizer, interpreted):
    """Frozen layers that the optimizer holds are left alone."""

    def fit(captured):
        model, options = thawing(optimizer, 4)
        return fitted(model, captured=captured, epochs=9, **options)[0]

    plain, ours = fit("off"), fit("on")
    assert len(Interpreted.graphs) == 2
    check_alike(ours, plain, within=1e-6)


class Seen(flatout.Callback):
    """What a callback finds once in `every` steps; it may end the fit."""

    def __init__(self, every, stop_at=None):
        self.every, self.stop_at, self.seen = every, stop_at, []

    def on_step(self, state):
        loop = state.trainer.loop
        rate = loop.optimizers[0].param_groups[0]["lr"]
        self.seen.append((state.step, state.step_in_epoch, rate, loop.mean_loss()))
        if state.step == self.stop_at:
            state.stop_reason = "the test"


@pytest.mark.parametrize(
    ("everies", "scheduled", "most"), [((), False, 25), ((3, 7), False, 40), ((), True, 60)]
)
def test_steps_in_a_row_end_where_something_is_due(
    everies, scheduled, most, interpreted, monkeypatch
):
    """Callbacks and schedules find at each of their steps what they find without a graph."""
    rows = []
    made = fit_module.captured_steps
    monkeypatch.setattr(fit_module, "captured_steps", lambda *given: rows.append(1) or made(*given))

    def fit(captured):
        seen = [Seen(every) for every in everies]
        schedule = lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.2, total_steps=60)  # noqa: E731
        _, history = fitted(
            net(),
            captured=captured,
            optimizer=SGD,
            callbacks=seen,
            scheduler=schedule if scheduled else None,
        )
        return [one.seen for one in seen], history

    theirs, plain = fit("off")
    assert not rows
    ours, history = fit("on")
    assert len(interpreted) == 4 * 10 - 2
    assert len(rows) <= most  # at most two an epoch, and more where something is due
    for mine, other in zip(ours, theirs, strict=True):
        assert [one[:3] for one in mine] == [one[:3] for one in other]
        assert [one[3] for one in mine] == pytest.approx([one[3] for one in other], rel=1e-4)
    timeline = history.timeline
    assert timeline.steps == plain.timeline.steps == 50
    assert timeline.step_samples().tolist() == plain.timeline.step_samples().tolist()
    assert (timeline.step_times() > 0).all()


@pytest.mark.slow
def test_a_resume_goes_on_within_steps_in_a_row(interpreted, tmp_path):
    def begin(folder, **options):
        trainer, _ = fitted(net(), run=tmp_path / folder, epochs=8, **options)
        return trainer

    plain = begin("off", captured="off")
    stopped = begin("on", callbacks=[Seen(13, stop_at=13)])
    assert stopped.loop.step_count == 13
    ours = job(net(), run=tmp_path / "on")
    ours.fit(data(), batch_size=32, epochs=8, progress=False, callbacks=[Seen(13)], resume=True)
    assert ours.loop.step_count == 40
    check_alike(ours, plain)


def test_a_signal_ends_steps_in_a_row(interpreted, monkeypatch, tmp_path):
    """After the very step in which it came, with a checkpoint."""
    load = capture.loaded

    def sending(number):
        run = load(number)

        def call(inputs):
            if len(interpreted) == 9:
                signal.raise_signal(signal.SIGTERM)
            return run(inputs)

        return call

    monkeypatch.setattr(capture, "loaded", sending)
    trainer = job(net(), run=tmp_path / "run")
    with pytest.raises(SystemExit):
        trainer.fit(data(samples=160), batch_size=32, epochs=8, progress=False)
    assert trainer.loop.step_count == 2 + 10  # the first two, and ten calls
    assert trainer.loop.is_saved


class Counting(nn.Sequential):
    def forward(self, x):
        self.calls = getattr(self, "calls", 0) + 1
        return super().forward(x)


class Deciding(nn.Sequential):
    def forward(self, x):
        y = super().forward(x)
        return y if y.sum() > 0 else y * 2


class OnNumpy(nn.Sequential):
    def forward(self, x):
        return super().forward(torch.from_numpy(x.numpy() * 2))


class Keeping(nn.Sequential):
    def __init__(self, *layers):
        super().__init__(*layers)
        self.mask = torch.ones(12)

    def forward(self, x):
        return super().forward(x * self.mask)


def hooked():
    model = net()
    model[0].register_forward_hook(lambda module, inputs, output: None)
    return model


@pytest.mark.parametrize(
    ("model", "options", "why"),
    [
        (network, {}, "draws random numbers"),
        (hooked, {}, "0 (Linear) has hooks"),
        (lambda: Counting(nn.Linear(12, 3)), {}, "the model change again and again"),
        (lambda: Deciding(nn.Linear(12, 3)), {}, "cannot be traced"),
        (lambda: OnNumpy(nn.Linear(12, 3)), {}, "cannot be traced"),
        (lambda: Keeping(nn.Linear(12, 3)), {}, "keeps a tensor"),
        (lambda: net(), {"optimizer": torch.optim.RMSprop}, "update of RMSprop cannot be captured"),
        (
            lambda: net(),
            {"loss": lambda output, y: output.logsumexp(1).mean()},
            "your own function",
        ),
        (lambda: net(), {"accumulate": 2}, "several batches"),
    ],
)
def test_what_is_not_captured_says_why(model, options, why, interpreted):
    torch.manual_seed(0)
    theirs, _ = fitted(model(), captured="off", epochs=3, **options)
    torch.manual_seed(0)
    ours, history = fitted(model(), epochs=3, **options)
    notes = [note for note in history.notes if note.startswith("compute.capture")]
    assert len(notes) == 1
    assert why in "".join(notes)
    if model is not network:
        check_alike(ours, theirs)


def test_a_graph_that_computes_something_else_is_dropped(interpreted, monkeypatch):
    load = capture.loaded

    def wrong(number):
        run = load(number)

        def more(inputs):
            returned = run(inputs)
            inputs[0].mul_(1.5)
            return returned

        return more

    monkeypatch.setattr(capture, "loaded", wrong)
    plain, _ = fitted(net(), captured="off", optimizer=SGD)
    ours, history = fitted(net(), optimizer=SGD)
    assert any("weights would differ" in note for note in history.notes)
    check_alike(ours, plain, within=0)


def test_a_graph_that_fails_is_dropped_and_the_step_is_made(interpreted, monkeypatch):
    def failing(number):
        run = load(number)

        def call(inputs):
            if len(interpreted) == fails_at:
                raise RuntimeError("index out of bounds")
            return run(inputs)

        return call

    load = capture.loaded
    monkeypatch.setattr(capture, "loaded", failing)
    plain, _ = fitted(net(), captured="off")
    for fails_at in (0, 12):
        interpreted.clear()
        ours, history = fitted(net())
        assert len(interpreted) == fails_at
        assert "compute.capture: steps run eagerly: index out of bounds" in history.notes
        check_alike(ours, plain)


def test_a_child_that_fails_costs_nothing(monkeypatch, tmp_path):
    """The child is not Python here, and ends with a status."""
    monkeypatch.setattr(capture.sys, "executable", "/bin/false")
    stop = Interrupt(lambda state: time.sleep(0.2), 1)
    plain, _ = fitted(net(), captured="off")
    ours, history = fitted(net(), callbacks=[stop])
    assert any("compiling failed: the process ended" in note for note in history.notes)
    check_alike(ours, plain, within=0)
    assert [path.name for path in (tmp_path / "cache" / "steps").iterdir()] == [".made-by-flatout"]


def test_a_child_that_never_ends_is_ended(monkeypatch, tmp_path):
    asleep = tmp_path / "asleep"
    asleep.write_text("#!/bin/sh\nread told\n")
    asleep.chmod(0o700)
    monkeypatch.setattr(capture.sys, "executable", str(asleep))
    _, history = fitted(net(), epochs=6, terms=Terms(ask_every=1, most_compile_s=-1.0))
    assert any("compiling took longer" in note for note in history.notes)
    fitted(net(), epochs=2)  # the run is over before
    assert [path.name for path in (tmp_path / "cache" / "steps").iterdir()] == [".made-by-flatout"]


# -- auto ----------------------------------------------------------------------------------------


class Later(Interpreted):
    """It takes until it has been asked a few times, and may fail then, or never end."""

    asks = 4
    fails = ""
    events = ()

    def done(self):
        self.asked += 1
        if self.asked < self.asks:
            return None
        if self.fails:
            raise capture.Unfit(f"compiling failed: {self.fails}")
        return super().done()

    @property
    def seconds(self):
        return 0.5

    def hold(self, holds):
        self.events.append(holds)

    def close(self):
        self.events.append("closed")


@pytest.fixture
def clock(interpreted, monkeypatch):
    """Seconds pass where the model computes: 4 ms a step, and 1 ms where it is captured."""
    of = SimpleNamespace(now=0.0, eager=0.004, captured=0.001, beside=0.0)

    def compute(self, batch):
        of.now += of.eager + (of.beside if Later.events and Later.events[-1] is False else 0.0)
        return call(self, batch)

    def slow(number):
        run = load(number)

        def step(inputs):
            of.now += of.captured
            return run(inputs)

        return step

    def read():
        return of.now

    call, load = ModelCompute.__call__, capture.loaded
    monkeypatch.setattr(ModelCompute, "__call__", compute)
    monkeypatch.setattr(capture, "loaded", slow)
    monkeypatch.setattr(capture, "Compiling", Later)
    monkeypatch.setattr(Later, "events", [])
    of.terms = Terms(
        clock=read,
        cpu_clock=read,
        # Fetching and copying take no time by this clock.
        input_s=lambda lanes: (0.0, 0.0),
        noise=1e9,
        trace_s=0.0,
        capture_s=0.1,
        spells_s=(0.02, 0.008),
        ask_every=1,
    )
    for module in (auto_capture, capture):  # on a single CPU the steps wait for the child
        monkeypatch.setattr(module, "usable_cpus", lambda: 2)
    return of


def tuned(clock, model=None, *, epochs=80, allow="tolerant", captured="auto", **options):
    options = {"metrics": [], "samples": 160, **options}
    options["terms"] = clock.terms
    return fitted(model or net(), epochs, allow=allow, captured=captured, **options)


def kept_answers(tmp_path):
    return [path.read_text() for path in (tmp_path / "cache" / "auto").glob("*.toml")]


def test_auto_has_the_step_compiled_beside_the_run_and_measures_it(clock, interpreted, tmp_path):
    said = []
    plain, _ = tuned(clock, captured="off")
    ours, history = tuned(clock, say=said.append)
    check_alike(ours, plain, within=1e-3)
    assert len(Interpreted.graphs) == 1
    assert Later.events[:2] == [True, False]  # held up now and then
    assert history.recipe.compute.capture == "on"
    choice = history.recipe.choices["compute.capture"]
    assert choice.ratio == pytest.approx(4, rel=0.1)
    assert choice.parity is Parity.TOLERANT
    (line,) = [line for line in said if "captured step" in line]
    assert "faster than without; compiled in" in line
    assert line in history.notes
    tuning = history.tuning
    assert tuning["trials"][-1]["b"] == {"compute.capture": "on"}
    assert tuning["spans"][-1]["settings"] == {"compute.capture": "on"}
    assert tuning["spans"][-1]["last"] == 400
    assert tuning["captures"][0]["is_there"]
    text = " ".join(history.explain().split())
    assert "the whole step as one graph: compiled in 0.5s during steps" in text
    assert "captured step" in text
    (kept,) = kept_answers(tmp_path)
    assert 'capture = "on"' in kept
    # The next run begins with it.
    before = len(interpreted)
    _, history = tuned(clock, say=said.append)
    assert history.tuning is None
    assert "from the cache" in said[-2] + said[-1]
    assert len(interpreted) > before + 300


def test_a_graph_that_is_not_faster_is_not_kept(clock, interpreted, tmp_path):
    clock.captured = 0.0045
    _, history = tuned(clock)
    assert history.recipe.compute.capture == "off"
    assert "not faster" in history.recipe.choices["compute.capture"].reason
    assert history.tuning["trials"][-1]["chosen"] == "a"
    assert len(interpreted) < 100
    (kept,) = kept_answers(tmp_path)
    assert 'capture = "off"' in kept


def test_a_compilation_that_fails_is_dropped_with_a_line(clock, monkeypatch, tmp_path):
    monkeypatch.setattr(Later, "fails", "no compiler")
    plain, _ = tuned(clock, captured="off")
    ours, history = tuned(clock)
    check_alike(ours, plain, within=0)
    assert history.tuning["dropped"] == {"compute.capture": "compiling failed: no compiler"}
    assert "compute.capture: compiling failed: no compiler" in history.explain()
    assert "given up after" in history.explain()
    assert not any("compute.capture" in note for note in history.notes)
    assert len(kept_answers(tmp_path)) == 1


def test_a_run_that_ends_before_the_graph_is_there_keeps_no_answer(clock, monkeypatch, tmp_path):
    monkeypatch.setattr(Later, "asks", 10**6)
    _, history = tuned(clock)
    assert Later.events[-1] == "closed"
    why = "was not measured: the run ended while it was compiled"
    assert history.tuning["dropped"] == {"compute.capture": why}
    assert history.recipe.choices["compute.capture"].reason == why
    assert kept_answers(tmp_path) == []


def test_a_compilation_that_slows_the_steps_too_much_is_ended(clock, monkeypatch):
    monkeypatch.setattr(Later, "asks", 10**6)
    clock.beside = 0.02
    _, history = tuned(clock)
    assert "cost its steps" in history.tuning["dropped"]["compute.capture"]
    assert "closed" in Later.events
    (found,) = history.tuning["captures"]
    assert found["last"] < 100
    assert history.tuning["lost_s"] == pytest.approx(found["cost_s"], rel=0.5)


@pytest.mark.slow
def test_what_is_captured_by_choice_is_compiled_once(clock, interpreted):
    """A layer changes later: from then on steps run eagerly."""

    def change(state):
        state.trainer.model[1].momentum = 0.5

    plain, _ = tuned(clock, captured="off", callbacks=[Interrupt(change, 50)])
    ours, history = tuned(clock, callbacks=[Interrupt(change, 50)])
    check_alike(ours, plain, within=1e-3)
    assert 30 < len(interpreted) < 230
    assert len(Interpreted.graphs) == 1
    assert any("the model or its settings have changed" in note for note in history.notes)
    assert history.recipe.compute.capture == "off"


@pytest.mark.parametrize(
    ("model", "options", "why"),
    [
        (net, {"eager": 0.02}, "calling operators is a small part of that"),
        (net, {"epochs": 12}, "too short to repay compiling"),
        (network, {}, "the model draws random numbers"),
        (hooked, {}, "0 (Linear) has hooks"),
        (net, {"few": 0.1}, "calling operators is a small part of a step"),
    ],
)
def test_auto_reports_why_it_does_not_compile(model, options, why, clock):
    clock.eager = options.get("eager", clock.eager)
    clock.terms = replace(clock.terms, calls=0.4 / options.get("few", 1))
    _, history = tuned(clock, model(), epochs=options.get("epochs", 30))
    assert Interpreted.graphs == []
    assert why in history.recipe.choices["compute.capture"].reason
    assert history.recipe.compute.capture == "off"


@pytest.mark.slow
def test_a_graph_that_is_asked_for_is_no_other_machine(clock, interpreted):
    """Its pace is learned when it comes; where steps do get slower, settings are tried again."""

    def slow(state):
        clock.captured = 0.004

    torch.set_num_threads(1)  # then auto has no other number of threads to try
    _, history = tuned(clock, captured="on", threads="auto", epochs=90)
    assert not any("settings are tried once more" in note for note in history.notes)
    assert history.tuning["step_s"]["chosen"] == pytest.approx(0.001, rel=0.1)
    calm = len(interpreted)
    interpreted.clear()
    changes = [Interrupt(slow, 60)]
    _, history = tuned(clock, captured="on", threads="auto", callbacks=changes, epochs=200)
    (note,) = [note for note in history.notes if "settings are tried once more" in note]
    assert "steps take 4 times as long" in note
    assert len(Interpreted.graphs) == 2  # one for each run: the second's was only set aside
    assert calm > 400
    assert 850 < len(interpreted) < 995
    assert not any("compute.capture" in span["settings"] for span in history.tuning["spans"])
    assert history.tuning["step_s"]["chosen"] == pytest.approx(0.004, rel=0.1)


def test_exact_never_compiles(clock):
    _, history = tuned(clock, allow="exact")
    assert Interpreted.graphs == []
    assert history.recipe.compute.capture == "off"


@pytest.mark.slow
def test_after_a_thaw_the_step_is_compiled_again(clock, interpreted, tmp_path):
    def fit(captured):
        model, options = thawing(ADAM, 30)
        return tuned(clock, model, captured=captured, epochs=60, **options)

    plain, _ = fit("off")
    interpreted.clear()
    ours, history = fit("auto")
    check_alike(ours, plain, within=1e-3)
    assert len(Interpreted.graphs) == 2
    first, second = history.tuning["captures"]
    assert first["last"] < 150 < second["first"]
    assert all(one["is_there"] for one in (first, second))
    assert history.recipe.compute.capture == "on"
    captured = {"compute.capture": "on"}
    spans = [span for span in history.tuning["spans"] if span["settings"] == captured]
    assert [
        any(a <= s["first"] and s["last"] <= b for s in spans) for a, b in ((1, 150), (151, 300))
    ]
    assert spans[-1]["last"] == 300
    assert history.explain().count("the whole step as one graph: compiled in") == 2
    # The next run has both from the cache.
    assert len(kept_answers(tmp_path)) == 2
    before = len(interpreted)
    ours, history = fit("auto")
    check_alike(ours, plain, within=1e-3)
    assert history.tuning is None
    assert len(interpreted) > before + 280


def test_after_a_late_thaw_steps_run_as_ever(clock, interpreted):
    """Also where the job before it had its graph from the cache."""

    def fit(captured):
        model, options = thawing(ADAM, 55)
        return tuned(clock, model, captured=captured, epochs=60, **options)

    plain, _ = fit("off")
    for _ in range(2):
        Interpreted.graphs.clear()
        ours, history = fit("auto")
        check_alike(ours, plain, within=1e-3)
        assert len(Interpreted.graphs) == 1
    assert any("too few steps are left" in note for note in history.notes)


def endless(clock, epochs, **options):
    """A fit over batches whose number is not known."""
    options["terms"] = clock.terms
    trainer = job(net(), captured="auto", allow="tolerant", metrics=[], **options)
    x, y = data(samples=160)
    batches = lambda: zip(x.split(32), y.split(32), strict=True)  # noqa: E731
    return trainer, trainer.fit(batches, epochs=epochs, progress=False)


@pytest.mark.slow
def test_a_run_of_unknown_length_compiles_once_it_has_lasted(clock, interpreted, tmp_path):
    """Taken to last as long again, it repays compiling after four times as long as that takes."""
    clock.terms = replace(clock.terms, sure_s=0.1, capture_s=0.25)
    _, history = endless(clock, 30)  # 0.6 s
    assert Interpreted.graphs == []
    assert history.recipe.choices["compute.capture"].reason == auto_capture.NOT_YET
    assert auto_capture.NOT_YET in " ".join(history.explain().split())
    (kept,) = kept_answers(tmp_path)
    # What the next one finds in the cache is all but that.
    said = []
    _, history = endless(clock, 90, say=said.append)
    assert "from the cache" in said[0]
    assert len(Interpreted.graphs) == 1
    (capture,) = history.tuning["captures"]
    assert 250 <= capture["first"] < 400
    assert history.recipe.compute.capture == "on"
    assert [trial["b"] for trial in history.tuning["trials"]] == [{"compute.capture": "on"}]
    (now,) = kept_answers(tmp_path)
    assert now != kept
    _, history = endless(clock, 10)
    assert history.tuning is None
    assert history.recipe.compute.capture == "on"


@pytest.mark.parametrize(
    ("cpus", "threads", "may_lend", "lends"),
    [
        (2, 2, True, True),
        (2, 4, True, True),
        (4, 2, True, False),
        (1, 1, True, False),
        (2, 2, False, False),
    ],
)
def test_steps_on_all_cpus_leave_one_to_the_child(cpus, threads, may_lend, lends, monkeypatch):
    monkeypatch.setattr(capture, "usable_cpus", lambda: cpus)
    assert capture.lends_cpu(threads, may_lend) is lends


@pytest.mark.parametrize(
    ("cpus", "may_lend", "ratio", "share"),
    [
        (4, True, None, 0.05),  # a CPU is free
        (2, True, 0.8, 0.25),  # as slow as one thread was measured
        (2, True, 1.01, 0.05),
        (2, True, None, 0.5),
        (2, False, None, 1.0),
    ],
)
def test_what_a_thread_less_costs_is_reckoned_with(cpus, may_lend, ratio, share, monkeypatch):
    trials = {} if ratio is None else {"process.threads": SimpleNamespace(ratio=ratio)}
    best = SimpleNamespace(threads=2)
    search = SimpleNamespace(best=best, threads=may_lend, results=trials)
    for module in (capture, auto_capture):
        monkeypatch.setattr(module, "usable_cpus", lambda: cpus)
    assert auto_capture._slowed(search) == pytest.approx(share)


@pytest.mark.slow
@pytest.mark.parametrize(("asked", "lent", "nice"), [("auto", 1, 19), (2, 2, 5)])
def test_the_child_gets_a_cpu_of_the_steps(asked, lent, nice, interpreted, monkeypatch):
    """On all CPUs, a thread less; where the number is asked for, more priority."""

    class Told(Later):
        def __init__(self, graph, digest, nice, longest_s):
            super().__init__(graph, digest, nice, longest_s)
            niceness.append(nice)

    def compute(self, batch):
        is_beside = bool(Interpreted.graphs) and not interpreted
        threads.setdefault(is_beside, set()).add(torch.get_num_threads())
        return call(self, batch)

    niceness, threads, call = [], {}, ModelCompute.__call__
    own = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        monkeypatch.setattr(ModelCompute, "__call__", compute)
        monkeypatch.setattr(capture, "usable_cpus", lambda: 2)
        monkeypatch.setattr(capture, "Compiling", Told)
        trainer = job(net(), threads=asked)
        trainer.fit(data(samples=160), batch_size=32, epochs=4, progress=False)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(own)
    assert niceness == [nice]
    assert threads[False] == {2}
    assert lent in threads[True]


_TRAINING = """
import torch, sys
sys.path.insert(0, {tests!r})
from test_train_capture import fitted, net
fitted(net(), epochs=100_000)
"""


@pytest.mark.slow
def test_a_training_that_is_killed_leaves_no_process_and_no_file(tmp_path):
    """Also no compiler that the child has started."""
    code = _TRAINING.format(tests=str(Path(__file__).parent))
    parent = subprocess.Popen(
        [sys.executable, "-c", code], env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    steps = tmp_path / "cache" / "steps"

    def left():
        found = [p.info["cmdline"] or [] for p in psutil.process_iter(["cmdline"])]
        return [command for command in found if any(str(tmp_path) in part for part in command)]

    def until(holds):
        for _ in range(600):
            if holds():
                return
            time.sleep(0.05)
        pytest.fail(f"{left()}, {list(steps.iterdir()) if steps.exists() else ''}")

    until(lambda: len(left()) >= 2)  # the guard, and what compiles
    parent.kill()
    parent.wait()
    until(lambda: not left() and [p.name for p in steps.iterdir()] == [".made-by-flatout"])


def test_a_kept_package_is_loaded_only_as_it_was_kept(tmp_path):
    (tmp_path / "made").write_bytes(b"compiled code")
    assert capture.kept_package("abc") is None
    capture.keep_package(tmp_path / "made", "abc")
    path = capture.kept_package("abc")
    assert path.read_bytes() == b"compiled code"
    path.write_bytes(b"compiled c0de")
    assert capture.kept_package("abc") is None
    path.write_bytes(b"compiled code")
    assert capture.kept_package("abc") == path
    (tmp_path / "cache").chmod(0o777)
    assert capture.kept_package("abc") is None
    (tmp_path / "cache").chmod(0o700)
    capture.remove_package("abc")
    assert capture.kept_package("abc") is None
