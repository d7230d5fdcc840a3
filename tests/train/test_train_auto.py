"""auto: what it may try, that it leaves no trace, and that it follows what was measured."""

from __future__ import annotations

import copy
import functools
import random

import numpy as np
import pytest
import torch
from torch import nn

import flatout
from flatout.data.source import as_source
from flatout.devices import allocator
from flatout.measure import OutOfTime, run_trial
from flatout.models import Rewrite
from flatout.recipe import FIELDS, PLAIN, Parity, Recipe, ResolvedRecipe
from flatout.train import auto, auto_budget, auto_trials
from flatout.train.loop import Loop
from flatout.train.snapshot import random_state
from flatout.train.step import Stepper


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FLATOUT_CACHE", str(tmp_path / "cache"))
    # Long enough a run that measuring is always worth it, short enough for a test.
    monkeypatch.setattr(auto_budget, "LONGEST_S", 1.0)
    monkeypatch.setattr(auto_trials, "BLOCK_S", 0.002)
    monkeypatch.setattr(auto_trials, "NOISE", 1e9)  # tests run on busy machines
    yield
    allocator.default_memory()


def small_net(seed: int = 0, dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Dropout(dropout),
        nn.Flatten(),
        nn.Linear(8 * 49, 10),
    )


def small_data(samples: int = 256):
    generator = torch.Generator().manual_seed(1)
    x = torch.rand(samples, 1, 14, 14, generator=generator)
    return x, torch.randint(0, 10, (samples,), generator=generator)


def prepared(model, *, allow="tolerant", recipe=None, steps=100_000, compute=None, said=None):
    optimizer = torch.optim.Adam(model.parameters())
    loop = Loop(recipe, allow=allow, say=(said.append if said is not None else lambda line: None))

    def plain_compute(batch):
        return nn.functional.cross_entropy(model(batch.inputs).float(), batch.targets)

    source = as_source(small_data(), batch_size=64)
    loop.prepare(model, optimizer, compute=compute or plain_compute, data=source, steps=steps)
    return loop, optimizer


class Clock:
    """Seconds that pass only where a model computes."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def timed_by(monkeypatch, seconds, longest_s=1000.0):
    """Let each pass take what a function from Settings to seconds per step of 64 samples says."""
    clock, real = Clock(), auto_trials.Trials.__init__

    def init(self, stepper, compute, batches, plain, budget):
        def passing(batch):
            share = 1 if torch.is_grad_enabled() else 1 / 3
            clock.now += seconds(stepper.switch.now) * share * batch.size / 64
            return compute(batch)

        real(self, stepper, passing, batches, plain, budget)

    monkeypatch.setattr(auto_trials.Trials, "__init__", init)
    monkeypatch.setattr(auto, "clock", clock)
    monkeypatch.setattr(auto_budget, "LONGEST_S", longest_s)
    return clock


def test_measuring_leaves_no_trace():
    model = small_net(dropout=0.1)
    optimizer = torch.optim.Adam(model.parameters())
    x, y = small_data()
    for _ in range(3):  # a state that a trial could spoil
        nn.functional.cross_entropy(model(x[:64]), y[:64]).backward()
        optimizer.step()
        optimizer.zero_grad()
    weights = copy.deepcopy(model.state_dict())
    state = copy.deepcopy(optimizer.state_dict()["state"])
    randoms = random_state()
    loop = Loop(allow="redrawn", say=lambda line: None)
    source = as_source((x, y), batch_size=64)

    def compute(batch):
        return nn.functional.cross_entropy(model(batch.inputs).float(), batch.targets)

    loop.prepare(model, optimizer, compute=compute, data=source, steps=100_000)
    assert all(torch.equal(v, weights[k]) for k, v in model.state_dict().items())
    now = optimizer.state_dict()["state"]
    assert all(
        torch.equal(torch.as_tensor(now[p][k]), torch.as_tensor(v))
        for p in state
        for k, v in state[p].items()
    )
    assert torch.equal(randoms["torch"], torch.get_rng_state())
    assert randoms["python"] == random.getstate()
    assert np.array_equal(
        randoms["numpy"]["state"]["key"], np.random.get_state(legacy=False)["state"]["key"]
    )
    assert all(p.grad is None for p in model.parameters())
    assert model.training


def test_exact_tries_exact_options_only():
    loop, _ = prepared(small_net(), allow="exact")
    resolved = loop.resolved
    assert resolved is not None
    assert max(choice.parity for choice in resolved.choices.values()) is Parity.EXACT
    assert resolved.compute.precision == "fp32"
    assert resolved.compute.memory_format == "contiguous"


def test_what_the_user_asked_for_is_kept():
    recipe = Recipe(compute={"precision": "fp32", "memory_format": "channels_last"})
    loop, _ = prepared(small_net(), recipe=recipe)
    assert loop.resolved.compute.precision == "fp32"
    assert loop.resolved.compute.memory_format == "channels_last"
    weight = loop.model[0].weight
    assert weight.is_contiguous(memory_format=torch.channels_last)


def test_dropout_on_images_forbids_a_new_layout_unless_redrawn(monkeypatch):
    timed_by(monkeypatch, lambda s: 0.01 if s.memory_format == "channels_last" else 0.1)
    drawn, _ = prepared(small_net(dropout=0.5), allow="tolerant")
    assert drawn.resolved.compute.memory_format == "contiguous"
    redrawn, _ = prepared(small_net(dropout=0.5), allow="redrawn")
    assert redrawn.resolved.compute.memory_format == "channels_last"


def test_dropout_behind_flatten_does_not_forbid_it(monkeypatch):
    timed_by(monkeypatch, lambda s: 0.01 if s.memory_format == "channels_last" else 0.1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Dropout(0.5), nn.Linear(4 * 144, 10))
    loop, _ = prepared(model, allow="tolerant")
    assert loop.resolved.compute.memory_format == "channels_last"


def test_options_are_kept_or_dropped_by_what_was_measured(monkeypatch):
    def seconds(s):
        # bf16 hurts, channels_last helps a lot, the fused optimizer makes no difference.
        return (
            0.1
            * (1.5 if s.precision == "bf16" else 1.0)
            * (0.3 if s.memory_format == "channels_last" else 1.0)
        )

    timed_by(monkeypatch, seconds)
    said: list[str] = []
    loop, _ = prepared(small_net(), said=said)
    resolved = loop.resolved
    assert resolved.compute.memory_format == "channels_last"
    assert resolved.compute.precision == "fp32"
    assert resolved.compute.fused_optimizer == "off"
    choice = resolved.choices["compute.memory_format"]
    assert choice.parity is Parity.TOLERANT
    assert choice.ratio == pytest.approx(1 / 0.3, rel=1e-6)
    assert len(said) == 1
    assert "channels_last" in said[0]
    assert "rounding" in said[0]


def test_nothing_faster_means_plain(monkeypatch):
    timed_by(monkeypatch, lambda s: 0.1)
    said: list[str] = []
    loop, _ = prepared(small_net(), said=said)
    assert loop.resolved.summary() == "as plain PyTorch"
    assert "left as it is" in said[0]


def test_options_that_help_only_together_are_found(monkeypatch):
    def seconds(s):
        both = s.precision == "bf16" and s.memory_format == "channels_last"
        return 0.03 if both else 0.15 if s.precision == "bf16" else 0.1

    monkeypatch.setattr(auto, "_has_bf16_units", lambda device: True)
    timed_by(monkeypatch, seconds)
    loop, _ = prepared(small_net())
    assert loop.resolved.compute.precision == "bf16"
    assert loop.resolved.compute.memory_format == "channels_last"


def test_one_thread_is_tried_for_short_steps(monkeypatch):
    if torch.get_num_threads() == 1:
        pytest.skip("there is one CPU only")
    threads = torch.get_num_threads()
    timed_by(monkeypatch, lambda s: 0.001 if s.threads == 1 else 0.002)
    loop, _ = prepared(small_net())
    try:
        assert loop.resolved.process.threads == 1
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(threads)


class _FailsInHalf(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(196, 10)

    def forward(self, x):
        y = self.layer(x.flatten(1))
        if y.dtype == torch.bfloat16:
            raise RuntimeError("no kernel for BFloat16")
        return y


class _NanInHalf(_FailsInHalf):
    def forward(self, x):
        y = self.layer(x.flatten(1))
        return y * float("nan") if y.dtype == torch.bfloat16 else y


@pytest.mark.slow
@pytest.mark.parametrize("model", [_FailsInHalf, _NanInHalf])
def test_an_option_that_fails_or_gives_nan_is_rejected(model, monkeypatch):
    monkeypatch.setattr(auto, "_has_bf16_units", lambda device: True)
    timed_by(monkeypatch, lambda s: 0.01 if s.precision == "bf16" else 0.1)
    loop, _ = prepared(model())
    assert loop.resolved.compute.precision == "fp32"
    assert not loop.stepper.update.was_bad()


def test_a_rewrite_that_changes_the_result_is_rejected(monkeypatch):
    model = small_net()

    def apply():
        model[0].weight.data.mul_(2)
        return lambda: model[0].weight.data.div_(2)

    wrong = [Rewrite("doubles the weights", apply)]
    monkeypatch.setattr(auto, "find_rewrites", lambda m: wrong)
    monkeypatch.setattr("flatout.train.settings.find_rewrites", lambda m: wrong)
    timed_by(monkeypatch, lambda s: 0.01 if s.rewrites == "on" else 0.1)
    loop, _ = prepared(model)
    assert loop.resolved.compute.rewrites == "off"


def test_the_answer_is_cached_and_keyed_by_the_job(monkeypatch):
    threads = torch.get_num_threads()
    timed_by(monkeypatch, lambda s: 0.1)
    first, _ = prepared(small_net())
    # As the next process begins, whatever was decided for this one.
    allocator.default_memory()
    torch.set_num_threads(threads)
    calls: list[int] = []
    real = auto_trials.Trials.first_step

    def first_step(self):
        calls.append(1)
        return real(self)

    monkeypatch.setattr(auto_trials.Trials, "first_step", first_step)
    said: list[str] = []
    again, _ = prepared(small_net(), said=said)
    assert calls == []
    assert "from the cache" in said[0]
    assert again.resolved.request() == first.resolved.request()
    prepared(nn.Sequential(nn.Flatten(), nn.Linear(196, 10)))
    prepared(small_net(), allow="exact")
    assert len(calls) == 2


def test_what_was_measured_on_a_busy_machine_is_not_kept(monkeypatch, tmp_path):
    times = iter(range(1, 10**6))
    timed_by(monkeypatch, lambda s: 0.01 * (1 + next(times) % 7))
    monkeypatch.setattr(auto_trials, "NOISE", 0.2)
    said: list[str] = []
    prepared(small_net(), said=said)
    assert "busy" in said[0]
    assert not (tmp_path / "cache" / "auto").exists()


def test_a_damaged_cache_is_measured_again(monkeypatch, tmp_path):
    timed_by(monkeypatch, lambda s: 0.1)
    prepared(small_net())
    (entry,) = (tmp_path / "cache" / "auto").glob("*.toml")
    entry.write_text("compute = nonsense")
    loop, _ = prepared(small_net())
    assert isinstance(loop.resolved, ResolvedRecipe)


def test_a_cache_that_cannot_be_written_is_no_error(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FLATOUT_CACHE", str(tmp_path / "file"))
    loop, _ = prepared(small_net())
    assert loop.resolved is not None


def test_a_short_run_takes_no_step_before_its_own(monkeypatch):
    steps = []
    real = Stepper.__call__

    def stepping(self, *args):
        steps.append(1)
        return real(self, *args)

    monkeypatch.setattr(Stepper, "__call__", stepping)
    said: list[str] = []
    loop, _ = prepared(small_net(), steps=59, said=said)
    assert loop.resolved.summary() == "as plain PyTorch"
    assert "too short" in said[0]
    assert not steps


@pytest.mark.parametrize("steps", [60, 150, 600, None])
@pytest.mark.parametrize("plain_s", [0.04, 0.16, 3.0])
@pytest.mark.parametrize("factor", [0.125, 1.0, 10.0])
def test_measuring_stays_within_its_share_whatever_a_step_takes(
    monkeypatch, steps, plain_s, factor
):
    """Much faster options leave a shorter run; much slower ones are expensive to try."""
    taken: list[float] = []

    def seconds(s):
        plain = (s.memory_format, s.fused_optimizer, s.rewrites) == ("contiguous", "off", "off")
        taken.append(plain_s * (1.0 if plain and s.precision == "fp32" else factor))
        return taken[-1]

    clock = timed_by(monkeypatch, seconds, longest_s=6.0)
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(288, 10))
    loop, _ = prepared(model, steps=steps, recipe=Recipe(memory={"allocator": "default"}))
    run_s = (10**9 if steps is None else steps) * seconds(loop.stepper.switch.now)
    # What a few samples cannot foretell is the first step under other settings.
    assert clock.now <= min(6.0, 0.1 * run_s) + max(taken)
    if factor <= 1:
        assert clock.now <= min(6.0, 0.1 * run_s)


def test_what_was_proven_when_time_is_up_is_used(monkeypatch):
    timed_by(monkeypatch, lambda s: 0.1 if s.memory_format == "contiguous" else 0.02, 2.0)
    said: list[str] = []
    # No round alone fits behind the one of all together.
    loop, _ = prepared(small_net(), said=said, recipe=Recipe(memory={"allocator": "default"}))
    assert loop.resolved.compute.memory_format == "channels_last"
    assert loop.resolved.compute.rewrites == "on"
    assert "together" in loop.resolved.choices["compute.rewrites"].reason


def test_a_trial_ends_with_the_rounds_that_were_whole():
    left = iter([0.2, 0.1, 0.1, 0.2, 0.2])

    def measure():
        try:
            return next(left)
        except StopIteration:
            raise OutOfTime from None

    assert run_trial(measure, measure).pairs == 1
    with pytest.raises(OutOfTime):
        run_trial(measure, measure)


def test_compiling_has_to_fit_into_the_tenth(monkeypatch):
    """A model of many modules may compile for longer than a tenth of ten minutes."""
    timed_by(monkeypatch, lambda s: 0.1)
    many = nn.Sequential(*(nn.Identity() for _ in range(60)), small_net())
    loop, _ = prepared(many, steps=6_100)
    assert "too short to repay" in loop.resolved.choices["compute.compile"].reason


def test_compiling_is_for_long_runs(monkeypatch):
    timed_by(monkeypatch, lambda s: 0.02 if s.compile == "on" else 0.1)
    short, _ = prepared(small_net(), steps=1_000)
    assert short.resolved.compute.compile == "off"
    assert "too short to repay" in short.resolved.choices["compute.compile"].reason
    monkeypatch.setattr(nn.Module, "compile", lambda self: None)  # the decision, not the compiler
    long, _ = prepared(small_net(), steps=1_000_000)
    assert long.resolved.compute.compile == "on"
    assert "saves" in long.resolved.choices["compute.compile"].reason


@pytest.mark.slow
def test_a_compiled_model_trains_and_keeps_its_keys():
    model = small_net()
    keys = list(model.state_dict())
    recipe = Recipe(compute={"compile": "on"})
    trainer = flatout.Trainer(model, recipe=recipe, allow="redrawn", say=lambda line: None)
    x, y = small_data()
    history = trainer.fit((x, y), batch_size=64, epochs=2, validation_data=(x, y), progress=False)
    assert history.epochs[-1]["loss"] < history.epochs[0]["loss"]
    assert list(model.state_dict()) == keys
    assert model._compiled_call_impl is None


def test_auto_changes_speed_only_at_exact():
    def train(**options):
        model = small_net(seed=3)
        trainer = flatout.Trainer(
            model,
            optimizer=functools.partial(torch.optim.Adam, lr=1e-3),
            say=lambda line: None,
            **options,
        )
        trainer.fit(small_data(), batch_size=64, epochs=3, progress=False)
        return model.state_dict()

    plain = Recipe(compute={"rewrites": "off"}, memory={"allocator": "default"})
    a, b = train(allow="exact"), train(allow="exact", recipe=plain)
    assert all(torch.equal(a[k], b[k]) for k in a)


def test_what_is_taken_where_nothing_is_measured(monkeypatch):
    monkeypatch.setattr(auto, "usable_cpus", torch.get_num_threads)
    loop, model = Loop(recipe=Recipe(world={"device": "cpu"}), say=lambda line: None), small_net()
    loop.prepare(model, torch.optim.Adam(model.parameters()))
    chosen = {f: (one.value, one.reason) for f, one in loop.resolved.choices.items()}
    special = {
        "compute.matmul_precision": (torch.get_float32_matmul_precision(), "plain"),
        "memory.micro_batch": ("whole", "split only if memory runs out"),
        "memory.allocator": (allocator.current(), "as the process started"),
        "process.threads": (torch.get_num_threads(), "torch's own"),
        "input.workers": (0, "plain, until batches are waited for"),
        "input.pin_memory": ("off", "no GPU"),
        "world.device": ("cpu", "asked for"),
    }
    for field in FIELDS:
        if Recipe().get(field) == "auto":
            assert chosen[field] == special.get(field, (PLAIN.get(field), "plain"))
