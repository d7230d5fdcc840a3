"""auto: what it may try, that each step counts, and that it follows what was measured."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import itertools
import os
import random
import tempfile
import threading
from queue import SimpleQueue

import numpy as np
import pytest
import torch
from torch import nn

import flatout
from flatout.data import ArraySource
from flatout.data.source import as_source
from flatout.devices import allocator
from flatout.measure import TrialResult
from flatout.models import Rewrite
from flatout.recipe import FIELDS, PLAIN, Parity, Recipe, ResolvedRecipe, Trial, loads
from flatout.train.loop import Loop
from flatout.train.settings import Settings
from flatout.train.snapshot import random_state
from flatout.train.terms import Terms
from flatout.train.tuning import auto
from flatout.train.tuning import first_check as auto_check
from flatout.train.tuning import search as auto_search
from flatout.train.tuning.budget import Budget
from flatout.world import messages


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FLATOUT_CACHE", str(tmp_path / "cache"))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # two wait for one another where others compute, too
    yield
    allocator.default_memory()
    torch.set_num_threads(threads)


# Terms that ignore noise, since tests run on busy machines, and skip measuring the machine.
CALM = Terms(noise=1e9, machine_rates=lambda *machine: None)


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


class Clock:
    """A clock that advances only while a model computes.

    Attributes:
        waited_s: seconds that each step reports as waiting for its batches. Real fetching and
            copying take no time by this clock.
        terms: the Terms of the Loops that use this clock.
    """

    def __init__(self) -> None:
        self.now = self.waited_s = 0.0
        self.terms = CALM
        self.set(clock=self, cpu_clock=self, input_s=lambda lanes: (self.waited_s, 0.0))
        self.lock = threading.Lock()  # a check restores all objects without a lock

    def __call__(self) -> float:
        return self.now

    def set(self, **terms) -> None:
        self.terms = dataclasses.replace(self.terms, **terms)


def with_bf16(device):
    return True


@pytest.fixture
def clock():
    return Clock()


def job(
    model, seconds=None, clock=None, *, allow="tolerant", recipe=None, steps=600, said=None,
    data=None, batch_size=64, accumulate=1,
):  # fmt: skip
    """A prepared Loop whose passes take what a function from Settings to seconds per step says."""
    say = said.append if said is not None else lambda line: None
    loop = Loop(recipe, allow=allow, accumulate=accumulate, say=say)
    loop.terms = CALM if clock is None else clock.terms

    def compute(batch):
        if seconds is not None:
            # A forward pass alone takes a third.
            share = 1 if torch.is_grad_enabled() else 1 / 3
            clock.now += seconds(loop.stepper.switch.now) * share * batch.size / 64
        return nn.functional.cross_entropy(model(batch.inputs).float(), batch.targets)

    source = as_source(data or small_data(), batch_size=batch_size)
    optimizer = torch.optim.Adam(model.parameters())
    loop.prepare(model, optimizer, compute=compute, data=source, steps=steps)
    return loop, compute, source


def run(loop, compute, source, steps=10_000):
    """Train until nothing is left to try, or for so many steps."""
    while loop.step_count < steps and loop.tuner is not None and loop.tuner.is_searching:
        for batch in loop.batches(source):
            if loop.step_count < steps and loop.tuner.is_searching:
                loop.step(compute, batch)
        loop.finish_epoch()
    return loop


def tuned(*args, **options):
    return run(*job(*args, **options))


def test_looking_at_options_leaves_no_trace():
    model = small_net(dropout=0.1)
    optimizer = torch.optim.Adam(model.parameters())
    x, y = small_data()
    for _ in range(3):  # a state that a check could spoil
        nn.functional.cross_entropy(model(x[:64]), y[:64]).backward()
        optimizer.step()
        optimizer.zero_grad()
    model[6].weight.grad = torch.ones_like(model[6].weight)
    weights = copy.deepcopy(model.state_dict())
    state = copy.deepcopy(optimizer.state_dict()["state"])
    randoms = random_state()
    loop = Loop(allow="redrawn", say=lambda line: None)

    def compute(batch):
        return nn.functional.cross_entropy(model(batch.inputs).float(), batch.targets)

    source = as_source((x, y), batch_size=64)
    loop.prepare(model, optimizer, compute=compute, data=source, steps=100_000)
    assert loop.tuner is not None
    assert len(loop.tuner.search.slower) > 2
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
    assert [p.grad is None for p in model.parameters()] == [True] * 4 + [False, True]
    assert model.training


def test_exact_tries_exact_options_only(clock):
    loop = tuned(small_net(), lambda s: 0.1, clock, allow="exact")
    resolved = loop.resolved
    assert max(choice.parity for choice in resolved.choices.values()) is Parity.EXACT
    assert resolved.compute.precision == "fp32"
    assert resolved.compute.memory_format == "contiguous"
    tried = {field for span in loop.tuning["spans"] for field in span["settings"]}
    assert tried <= {"compute.rewrites", "memory.allocator"}


def test_steps_under_exact_options_are_the_plain_steps(clock):
    """Tried on the job's own steps, with BatchNorm and dropout: the same weights, bit for bit."""
    ours, theirs = small_net(dropout=0.3), small_net(dropout=0.3)
    data = small_data()
    plain = Recipe(compute={"rewrites": "off"}, memory={"allocator": "default"})
    torch.manual_seed(1)
    loop = tuned(ours, lambda s: 0.01 if s.rewrites == "on" else 0.1, clock, allow="exact")
    assert loop.resolved.compute.rewrites == "on"
    steps = loop.step_count
    torch.manual_seed(1)
    other, compute, source = job(theirs, recipe=plain, allow="exact", data=data)
    for epoch in itertools.count():
        other.progress.epoch = epoch
        for batch in other.batches(source):
            if other.step_count < steps:
                other.step(compute, batch)
        if other.step_count >= steps:
            break
        other.finish_epoch()
    assert all(torch.equal(v, theirs.state_dict()[k]) for k, v in ours.state_dict().items())


def test_what_the_user_asked_for_is_kept(clock):
    recipe = Recipe(compute={"precision": "fp32", "memory_format": "channels_last"})
    loop = tuned(small_net(), lambda s: 0.1, clock, recipe=recipe)
    assert loop.resolved.compute.precision == "fp32"
    assert loop.resolved.compute.memory_format == "channels_last"
    assert all("compute.precision" not in span["settings"] for span in loop.tuning["spans"])
    weight = loop.model[0].weight
    assert weight.is_contiguous(memory_format=torch.channels_last)


def test_dropout_on_images_forbids_a_new_layout_unless_redrawn(clock):
    def seconds(s):
        return 0.01 if s.memory_format == "channels_last" else 0.1

    drawn = tuned(small_net(dropout=0.5), seconds, clock)
    assert drawn.resolved.compute.memory_format == "contiguous"
    redrawn = tuned(small_net(dropout=0.5), seconds, clock, allow="redrawn")
    assert redrawn.resolved.compute.memory_format == "channels_last"


def test_dropout_behind_flatten_does_not_forbid_it(clock):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Dropout(0.5), nn.Linear(4 * 144, 10))
    loop = tuned(model, lambda s: 0.01 if s.memory_format == "channels_last" else 0.1, clock)
    assert loop.resolved.compute.memory_format == "channels_last"


class Anneals(nn.Module):
    """Multiplies by more in each forward, as a schedule within a model does."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return x * self.calls


def test_passes_that_are_compared_meet_the_same_buffers(clock):
    model = small_net()
    model.append(Anneals())
    loop = tuned(model, lambda s: 0.01 if s.memory_format == "channels_last" else 0.1, clock)
    assert loop.resolved.compute.memory_format == "channels_last"
    assert model[-1].calls == loop.step_count


class Shrinks(nn.Module):
    """Halves its own weight in each forward, with no regard to the optimizer."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        with torch.no_grad():
            self.scale.mul_(0.5)
        return x * self.scale


def test_passes_that_are_compared_meet_the_same_weights(clock):
    model = small_net()
    model.append(Shrinks())
    loop = tuned(model, lambda s: 0.01 if s.memory_format == "channels_last" else 0.1, clock)
    assert loop.resolved.compute.memory_format == "channels_last"


def test_options_are_kept_or_dropped_by_measurements(clock):
    clock.set(has_bf16_units=with_bf16)

    def seconds(s):
        # bf16 hurts, channels_last helps a lot, the fused optimizer hurts a little.
        return (
            0.1
            * (1.5 if s.precision == "bf16" else 1.0)
            * (1.02 if s.fused_optimizer == "on" else 1.0)
            * (0.3 if s.memory_format == "channels_last" else 1.0)
        )

    said: list[str] = []
    loop = tuned(small_net(), seconds, clock, said=said, steps=6_000)
    resolved = loop.resolved
    assert resolved.compute.memory_format == "channels_last"
    assert resolved.compute.precision == "fp32"
    assert resolved.compute.fused_optimizer == "off"
    choice = resolved.choices["compute.memory_format"]
    assert choice.parity is Parity.TOLERANT
    assert choice.ratio == pytest.approx(1 / 0.3, rel=0.01)
    assert len(said) == 1
    assert "channels_last" in said[0]
    assert "rounding" in said[0]
    assert loop.feed.channels_last
    assert loop.notes() == said


@pytest.mark.parametrize("uses_cpu", [False, True], ids=["other work", "the option"])
def test_far_slower_options_are_found_by_cpu_time(clock, uses_cpu):
    """Before the first step other work can make any pass take many times as long by the clock."""
    clock.set(has_bf16_units=with_bf16)
    if not uses_cpu:
        clock.set(cpu_clock=lambda: 0.0)
    before_steps = True

    def seconds(s):
        is_slow = before_steps and s.precision == "bf16"
        return 1.0 if is_slow else 0.05 if s.precision == "bf16" else 0.1

    prepared = job(small_net(), seconds, clock, steps=6_000)
    before_steps = False
    loop = run(*prepared)
    assert (loop.resolved.compute.precision == "fp32") == uses_cpu
    why = loop.tuning["dropped"].get("compute.precision", "")
    assert ("a few samples take 10.0 times as long" in why) == uses_cpu


@pytest.mark.parametrize("uses_cpu", [False, True], ids=["other work", "the option"])
def test_a_first_step_drops_a_setting_only_where_it_takes_more_cpu_time(clock, uses_cpu):
    """bf16 is twice as fast; other work holds up its first three steps, or it is slow itself."""
    clock.set(has_bf16_units=with_bf16)
    delays: list[float] = []
    delayed_s = 0.0

    def seconds(s):
        nonlocal delayed_s
        if s.precision != "bf16":
            return 0.1
        delay = delays.pop() if delays else 0.0
        delayed_s += 0.0 if uses_cpu else delay
        return 0.05 + delay

    clock.set(cpu_clock=lambda: clock.now - delayed_s)
    others = dict.fromkeys(("fused_norms", "rewrites", "fused_optimizer"), "off")
    compute = {"memory_format": "contiguous", **others}
    recipe = Recipe(memory={"allocator": "default"}, compute=compute)
    prepared = job(small_net(), seconds, clock, steps=600, recipe=recipe)
    delays += [3.0] * 3
    loop = run(*prepared)
    assert (loop.resolved.compute.precision == "fp32") == uses_cpu
    assert (loop.tuning["lost_s"] > 2) == uses_cpu
    if uses_cpu:
        tried = [s for s in loop.tuning["spans"] if "compute.precision" in s["settings"]]
        assert sum(s["last"] - s["first"] + 1 for s in tried) == 1
        why = loop.tuning["dropped"]["compute.precision"]
        assert why == "a step takes 30.5 times as long with it"


def test_nothing_faster_means_plain(clock):
    said: list[str] = []
    loop = tuned(small_net(), lambda s: 0.1, clock, said=said)
    assert loop.resolved.summary() == "as plain PyTorch"
    assert "nothing measured faster than plain" in said[0]


def test_options_that_help_only_together_are_found(clock):
    def seconds(s):
        both = s.precision == "bf16" and s.memory_format == "channels_last"
        return 0.03 if both else 0.15 if s.precision == "bf16" else 0.1

    clock.set(has_bf16_units=with_bf16)
    loop = tuned(small_net(), seconds, clock)
    assert loop.resolved.compute.precision == "bf16"
    assert loop.resolved.compute.memory_format == "channels_last"


def test_an_option_that_helps_another_is_tried_again(clock):
    """All together lose by the fused optimizer; bf16 wins only once channels_last is there."""

    def seconds(s):
        both = s.precision == "bf16" and s.memory_format == "channels_last"
        of_pair = 0.04 if both else 0.15 if s.precision == "bf16" else 0.1
        of_pair *= 0.8 if s.memory_format == "channels_last" else 1
        return of_pair * (4 if s.fused_optimizer == "on" else 1)

    clock.set(has_bf16_units=with_bf16)
    loop = tuned(small_net(), seconds, clock, steps=6_000)
    chosen = loop.resolved.compute
    assert (chosen.precision, chosen.memory_format) == ("bf16", "channels_last")
    assert chosen.fused_optimizer == "off"


@pytest.mark.parametrize("steps", [20, 60])
@pytest.mark.parametrize("bf16", [0.5, 1.3])
def test_few_long_steps_are_enough(bf16, steps, clock):
    """Of 0.6 s each; where a few samples run slower in bf16, no step is made under it first."""

    def seconds(s):
        layout = 0.6 if s.memory_format == "channels_last" else 1.0
        return 0.6 * layout * (bf16 if s.precision == "bf16" else 1.0)

    clock.set(has_bf16_units=with_bf16)
    loop = tuned(small_net(), seconds, clock, steps=steps)
    chosen = loop.stepper.switch.now
    assert chosen.memory_format == "channels_last"
    assert chosen.precision == ("bf16" if bf16 < 1 else "fp32")
    first = loop.tuning["spans"][1]
    assert first["first"] <= 4
    assert ("compute.precision" in first["settings"]) == (bf16 < 1)


def test_two_samples_of_a_small_slow_batch_are_checked(clock):
    """Four of sixteen would take as long as the time before the first step may."""
    clock.set(has_bf16_units=with_bf16)
    seconds = lambda s: 6.0 * (0.5 if s.precision == "bf16" else 1.0)  # noqa: E731
    loop = tuned(small_net(), seconds, clock, steps=32, batch_size=16)
    assert loop.stepper.switch.now.precision == "bf16"


def searched(seconds, step_s, steps, cpu=None, **given):
    """A search on steps that take so many times `step_s`, as a function of their settings says.

    Args:
        seconds: the function.
        step_s: seconds of a step by the clock, and of CPU time.
        steps: of the run.
        cpu: another function, of CPU time; None where it says the same.
        given: as of Search.
    """
    values = {"precision": "bf16", "memory_format": "channels_last", "fused_optimizer": "on"}
    options = [
        auto_search.Option(f"compute.{name}", Trial(value, bool, why="planted"))
        for name, value in values.items()
    ]
    search = auto_search.Search(Settings(), options, Budget(steps, CALM), **given)
    follow(search, search.run(), seconds, step_s, cpu=cpu)
    return search


def follow(search, blocks, seconds, step_s, last=0, cpu=None):
    """Make the blocks of a search, behind step `last`."""
    answer = None
    with contextlib.suppress(StopIteration):
        while True:
            block = blocks.send(answer)
            took = step_s * seconds(block.settings)
            used = took if cpu is None else step_s * cpu(block.settings)
            steps = block.steps + block.settle
            last += steps
            search.budget.elapsed_s += took * steps
            answer = auto_search.BlockTimes(
                took, took * steps, steps, last, 0.0, used, used * steps
            )


def test_what_was_chosen_is_not_among_what_is_not_taken():
    def seconds(s):
        layout = 0.5 if s.memory_format == "channels_last" else 1.0
        return layout * (5.0 if s.precision == "bf16" else 1.0)

    # Too few steps are left to try anything again.
    search = searched(seconds, 0.1, 3_000)
    chosen = Settings(memory_format="channels_last", fused_optimizer="on")
    search.best = chosen
    follow(search, search.again(), seconds, 0.1, last=2_000)
    assert search.best == chosen
    assert set(search.dropped) == {"compute.precision"}
    assert search.kept["compute.memory_format"] == "stays as it was: the run is half over"

    # What there was no time to try is tried where steps take another time.
    search = searched(seconds, 0.1, 3_000)
    search.dropped["compute.memory_format"] = "was not measured: the run is too short for it"
    search.best = Settings()
    follow(search, search.again(), seconds, 0.1, last=500)
    assert search.best.memory_format == "channels_last"
    assert "compute.memory_format" not in search.dropped


@pytest.mark.parametrize("seed", range(1, 4))
def test_what_has_won_stays_where_noise_hides_it_later(seed):
    """channels_last wins beside the fused optimizer, which goes; without that steps are noisy."""
    noises = random.Random(seed)

    def seconds(s):
        noise = noises.uniform(0.9, 1.1) if s.fused_optimizer == "off" else 1.25
        half = 0.5 if s.precision == "bf16" else 1
        return noise * half * (0.95 if s.memory_format == "channels_last" else 1)

    search = searched(seconds, 0.1, 6_000)
    assert search.best == Settings(precision="bf16", memory_format="channels_last")
    again = search.trials[-1]
    assert again["b"] == {
        "compute.precision": "bf16",
        "compute.memory_format": "channels_last",
    }
    assert again["ratio"] > 1
    assert again["chosen"] == "b"


@pytest.mark.parametrize("seed", range(4))
def test_on_a_busy_machine_what_has_a_part_in_what_won_together_stays(seed):
    noises = random.Random(seed)

    def seconds(s):
        halves = 0.82 if s.precision == "bf16" else 1
        halves *= 0.82 if s.memory_format == "channels_last" else 1
        return noises.lognormvariate(0, 0.15) * halves

    best = searched(seconds, 0.015, 3_000).best
    assert (best.precision, best.memory_format) == ("bf16", "channels_last")

    # What gives too little to be seen alone stays, and what slows the others goes.
    def others(s):
        layout = 1.03 if s.memory_format == "channels_last" else 1
        fused = 0.98 if s.fused_optimizer == "on" else 1
        half = 0.5 if s.precision == "bf16" else 1
        return noises.lognormvariate(0, 0.02) * half * layout * fused

    best = searched(others, 0.015, 3_000).best
    assert best == Settings(precision="bf16", fused_optimizer="on")
    # All are plain where nothing is to be won.
    noises.seed(seed)  # draws of its own, however many the others took
    assert searched(lambda s: noises.lognormvariate(0, 0.08), 0.015, 3_000).best == Settings()


def test_other_work_that_meets_both_middle_blocks_drops_nothing():
    """They are the two of the setting that is tried: A B B A."""
    options = [auto_search.Option("compute.precision", Trial("bf16", bool, why="planted"))]

    def search(held_up_s, cpu_s):
        blocks = iter([1.0, 1.0, held_up_s, held_up_s])

        def seconds(s):
            return 0.5 * next(blocks, 1.0) if s.precision == "bf16" else 1.0

        half = lambda s: cpu_s if s.precision == "bf16" else 1.0  # noqa: E731
        search = auto_search.Search(Settings(), list(options), Budget(6_000, CALM))
        follow(search, search.run(), seconds, 0.1, cpu=half)
        return search

    assert search(8.0, 0.5).best.precision == "bf16"
    slow = search(8.0, 4.0)
    assert slow.best.precision == "fp32"
    assert [one["pairs"] for one in slow.trials] == [1]


def result_of(ratio, low, high, floor):
    return TrialResult(ratio, low, high, floor, 8, 0.1, 0.1 / ratio, 1.0)


def test_a_wide_interval_does_not_undo_a_proven_option():
    proven, wide = result_of(1.2, 1.15, 1.25, 0.02), result_of(0.9, 0.5, 1.3, 0.5)
    field = "compute.precision"

    def search():
        search = auto_search.Search(Settings(), [], Budget(6_000))
        search.best = Settings(precision="bf16")
        search.results[field] = proven
        return search

    assert search()._stays(field, wide)
    assert not search()._stays(field, result_of(0.95, 0.91, 0.99, 0.02))
    assert not auto_search.Search(Settings(), [], Budget(6_000))._stays(field, wide)

    def confirmed(whole):
        confirming = search()
        confirming._measured[Settings(), confirming.best] = whole
        assert not list(confirming._confirm())
        return confirming.best.precision, confirming.whole

    assert confirmed(wide) == ("bf16", None)
    assert confirmed(proven) == ("bf16", proven)
    assert confirmed(slower := result_of(0.95, 0.91, 0.99, 0.02)) == ("fp32", slower)
    assert confirmed(near := result_of(1.01, 0.97, 1.04, 0.03)) == ("fp32", near)


@pytest.mark.parametrize(("best", "tried"), [(0, [8, 2]), (8, [8, 16]), (16, [8, 16]), (2, [8, 2])])
def test_more_and_fewer_micro_batches_are_tried_where_there_are_stages(best, tried):
    seconds = {0: 1.0, 2: 1.1, 8: 0.9 if best == 16 else 1.1, 16: 1.2, best: 0.7}
    search = searched(lambda s: seconds[s.micro_batches], 0.1, 6_000, counts=([8, 16], [2]))
    assert search.best == Settings(micro_batches=best)
    asked = [one["b"].get("world.micro_batches") for one in search.trials]
    assert [number for number in dict.fromkeys(asked) if number] == tried
    choice = auto._choices(search, auto.ModelFacts())["world.micro_batches"]
    assert choice.value == best
    assert ("not faster" in choice.reason) == (best == 0)
    assert not searched(lambda s: 1.0, 0.1, 6_000).best.micro_batches


@pytest.mark.slow
def test_one_thread_is_tried_for_short_steps(clock, monkeypatch):
    torch.set_num_threads(2)
    monkeypatch.setattr(auto, "usable_cpus", lambda: 2)
    loop = tuned(small_net(), lambda s: 0.002 if s.threads == 1 else 0.004, clock, steps=2_000)
    assert loop.resolved.process.threads == 1
    assert torch.get_num_threads() == 1


class _InHalf(nn.Module):
    """What bf16 does to batches of more than so many samples, from the given call on."""

    def __init__(self, spoil, samples: int = 0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(196, 10)
        self.norm = nn.BatchNorm1d(10)
        self.spoil, self.samples = spoil, samples

    def forward(self, x):
        y = self.norm(nn.functional.dropout(self.layer(x.flatten(1)), 0.2))
        half = torch.is_autocast_enabled("cpu")
        return self.spoil(y) if half and len(x) > self.samples else y


def _fails(y):
    raise RuntimeError("no kernel for BFloat16")


def _no_memory(y):
    raise RuntimeError("DefaultCPUAllocator: not enough memory")


def _nan(y):
    return y * float("nan")


def _other_values(y):
    return y.flip(1)


@pytest.mark.parametrize("spoil", [_fails, _nan, _other_values, _no_memory])
def test_an_option_that_fails_or_changes_values_is_not_tried(spoil, clock):
    clock.set(has_bf16_units=with_bf16)
    model = _InHalf(spoil)
    loop = tuned(model, lambda s: 0.01 if s.precision == "bf16" else 0.1, clock)
    assert loop.resolved.compute.precision == "fp32"
    assert all("compute.precision" not in span["settings"] for span in loop.tuning["spans"])
    assert loop.tuning["dropped"]["compute.precision"]
    assert not loop.stepper.update.was_bad()


@pytest.mark.parametrize("spoil", [_fails, _nan, _no_memory])
def test_a_step_that_an_option_spoils_is_made_again(spoil, clock):
    """On a few samples all is well. The weights are those of the run without the option."""
    clock.set(has_bf16_units=with_bf16)
    others = {
        "compute.fused_norms": "off",
        "compute.fused_optimizer": "off",
        "memory.allocator": "default",
    }
    open_ = Recipe().replace({**others, "process.threads": torch.get_num_threads()})

    def train(model, recipe):
        torch.manual_seed(3)
        loop, compute, source = job(
            model, lambda s: 0.01 if s.precision == "bf16" else 0.1, clock, recipe=recipe
        )
        for _ in loop.epochs(5):
            for batch in loop.batches(source):
                loop.step(compute, batch)
        return loop

    spoiled, plain = _InHalf(spoil, 16), _InHalf(spoil, 16)
    loop = train(spoiled, open_)
    train(plain, open_.replace({"compute.precision": "fp32"}))
    assert not loop.tuner.is_searching
    assert loop.resolved.compute.precision == "fp32"
    why = loop.tuning["dropped"]["compute.precision"]
    assert why == "gave NaN" if spoil is _nan else "fails here" in why
    assert all(torch.equal(v, plain.state_dict()[k]) for k, v in spoiled.state_dict().items())
    assert loop.stepper.pieces == 1


def test_a_rewrite_that_changes_the_result_is_rejected(clock, monkeypatch):
    model = small_net()

    def apply():
        model[0].weight.data.mul_(2)
        return lambda: model[0].weight.data.div_(2)

    wrong = [Rewrite("doubles the weights", apply)]
    monkeypatch.setattr(auto, "find_rewrites", lambda m: wrong)
    monkeypatch.setattr("flatout.train.settings.find_rewrites", lambda m: wrong)
    loop = tuned(model, lambda s: 0.01 if s.rewrites == "on" else 0.1, clock)
    assert loop.resolved.compute.rewrites == "off"
    assert loop.tuning["dropped"]["compute.rewrites"] == "would change the result"


@pytest.fixture
def cold(clock):
    """A device that loads kernels at their first use, as a GPU does."""
    clock.set(starts_cold=lambda device: True)


def test_an_option_that_loads_kernels_is_judged_by_its_next_pass(clock, cold):
    clock.set(has_bf16_units=with_bf16)
    loaded: set[tuple[str, int]] = set()

    def job_of(loop_settings):
        return 0.03 if loop_settings.precision == "bf16" else 0.1

    model = small_net()
    forward = model.forward

    def loads(x):
        kind = (str(torch.is_autocast_enabled("cpu")), len(x))
        if kind not in loaded:
            loaded.add(kind)
            clock.now += 2.0 if len(x) < 64 else 1.0
        return forward(x)

    model.forward = loads
    loop = tuned(model, job_of, clock, steps=6_000)
    assert loop.resolved.compute.precision == "bf16"


def gradients_off(model, off):
    """Change the gradients of each backward by the share that a function returns."""

    def spoil(module, inputs, output):
        if output.requires_grad:
            output.register_hook(lambda gradient: gradient * (1 + off()))

    model.register_forward_hook(spoil)


@pytest.mark.parametrize("own", [0.02, 0.0])
def test_rounding_is_judged_by_the_errors_of_plain_gradients(own, clock, cold):
    """Convolutions in TF32 are off by some percent behind a BatchNorm."""
    model, formats = small_net(), ["contiguous"]

    def seconds(s):
        formats[:] = [s.memory_format]
        return 0.03 if s.memory_format != "contiguous" else 0.1

    def off():
        if formats == ["channels_last"]:
            return 0.03
        return own if torch.backends.cudnn.allow_tf32 else 0.0

    gradients_off(model, off)
    loop = tuned(model, seconds, clock)
    chosen = "channels_last" if own else "contiguous"
    assert loop.resolved.compute.memory_format == chosen
    if not own:
        why = loop.tuning["dropped"]["compute.memory_format"]
        assert why == "gradients differ by 3%: more than rounding"


@pytest.mark.parametrize("repeats", [True, False])
def test_an_exact_rewrite_may_differ_as_plain_passes_do_among_themselves(repeats, clock, cold):
    model, passes, rewrites = small_net(), itertools.count(), SimpleQueue()

    def seconds(s):
        rewrites.put(s.rewrites)
        return 0.03 if s.rewrites == "on" else 0.1

    def off():
        number = next(passes)
        is_plain = [rewrites.get() for _ in range(rewrites.qsize())][-1] == "off"
        return 0.0 if is_plain and repeats else 1e-6 * (1 + number % 2)

    gradients_off(model, off)
    loop = tuned(model, seconds, clock)
    assert loop.resolved.compute.rewrites == ("off" if repeats else "on")


def test_what_there_was_no_time_to_look_at_is_looked_at_on_a_step(
    clock, cold, monkeypatch, tmp_path
):
    """A GPU's first passes take long, and a run may be short."""
    clock.set(has_bf16_units=with_bf16)
    others = dict.fromkeys(("fused_norms", "rewrites", "fused_optimizer"), "off")
    open_ = Recipe(compute=others)

    def train(spoil):
        model = _InHalf(spoil)
        forward = model.forward

        def slow(x):
            clock.now += 0.1 if len(x) < 64 and torch.is_grad_enabled() else 0.0
            return forward(x)

        model.forward = slow
        seconds = lambda s: 0.02 if s.precision == "bf16" else 0.1  # noqa: E731
        return tuned(model, seconds, clock, steps=60, recipe=open_)

    loop = train(_other_values)
    assert loop.resolved.compute.precision == "fp32"
    assert "more than rounding" in loop.tuning["dropped"]["compute.precision"]
    assert all("compute.precision" not in span["settings"] for span in loop.tuning["spans"])
    assert loop.tuning["lost_s"] >= 0.2  # what the look took
    monkeypatch.setenv("FLATOUT_CACHE", str(tmp_path / "other"))
    assert train(lambda y: y).resolved.compute.precision == "bf16"


def test_options_that_are_right_alone_and_wrong_together_are_not_used_together(clock):
    clock.set(has_bf16_units=with_bf16)
    model = small_net()
    forward = model.forward

    def spoil(x):
        y = forward(x)
        lies_last = model[0].weight.stride(1) == 1
        return y.flip(1) if lies_last and torch.is_autocast_enabled("cpu") else y

    model.forward = spoil

    def seconds(s):
        half = 0.5 if s.precision == "bf16" else 1.0
        return 0.1 * half * (0.6 if s.memory_format == "channels_last" else 1.0)

    loop = tuned(model, seconds, clock, steps=6_000)
    both = {"compute.precision", "compute.memory_format"}
    assert all(not both <= set(span["settings"]) for span in loop.tuning["spans"])
    assert "more than rounding" in loop.tuning["dropped"]["together"]
    assert loop.resolved.compute.precision == "bf16"
    assert "more than rounding" in loop.tuning["dropped"]["compute.memory_format"]


def test_the_answer_is_cached_and_keyed_by_the_job(clock):
    threads = torch.get_num_threads()
    first = tuned(small_net(), lambda s: 0.1 if s.memory_format == "contiguous" else 0.02, clock)
    # As the next process begins, whatever was decided for this one.
    allocator.default_memory()
    torch.set_num_threads(threads)
    said: list[str] = []
    again, _, _ = job(small_net(), said=said)
    assert again.tuner is None
    assert again.tuning is None
    assert "from the cache" in said[0]
    assert again.resolved.request() == first.resolved.request()
    assert again.resolved.compute.memory_format == "channels_last"
    assert job(nn.Sequential(nn.Flatten(), nn.Linear(196, 10)))[0].tuner is not None
    assert job(small_net(), allow="exact")[0].tuner is not None


def test_what_a_run_had_no_time_to_measure_the_next_one_measures(clock):
    """Where other work makes the first steps slow, the time for tuning is soon spent."""
    options = {"precision": "fp32", "memory_format": "contiguous"}
    options |= {"fused_optimizer": "off", "rewrites": "off", "fused_norms": "off"}

    def seconds(factor):
        return lambda s: 0.1 * (1 if s == s.but(**options) else factor)

    busy = tuned(small_net(), seconds(1.45), clock, steps=40)
    assert not busy.tuning["trials"]
    calm = tuned(small_net(), seconds(0.5), clock, steps=40)
    assert calm.resolved.summary() != "as plain PyTorch"


def test_what_earlier_jobs_chose_is_tried_first(clock):
    def seconds(s):
        return 0.02 if s.rewrites == "on" else 0.1

    first = tuned(small_net(), seconds, clock)
    assert first.tuner.search.options[0].field != "compute.rewrites"
    again = job(small_net(), seconds, clock, allow="redrawn")[0]
    assert again.tuner.search.options[0].field == "compute.rewrites"


def planted(bf16_flops_per_s, calls, spread=1.1):
    """Counts of a step of 0.1 s of matrix products and an update of so many calls, with rates."""
    of = {"calls": 0, "flops": 0, "bytes": 0, "cached_bytes": 0}
    speeds = {"fp32": 1e9, "bf16": bf16_flops_per_s}
    kinds = ("matmul", "conv", "conv_1x1", "conv_depthwise")
    return {
        "device": "cpu",
        "lanes": {
            "forward": {"conv": {**of, "flops": 0.1e9}},
            "optimizer": {"elementwise": {**of, "calls": calls}},
        },
        "weights": {"bytes": 0, "state_bytes": 0, "tensors": 1},
        "rates": {
            "flops_per_s": {
                f"{precision}/{layout}": {kind: {"forward": s, "backward": s} for kind in kinds}
                for precision, s in speeds.items()
                for layout in ("contiguous", "channels_last")
            },
            "bytes_per_s": {p: {"memory": 1e9, "cache": 1e9} for p in speeds},
            "calls_per_s": 1e6,
            "nodes_per_s": 1e6,
            "spread": spread,
        },
    }


@pytest.mark.parametrize(
    ("counts", "first", "skipped"),
    [
        (planted(4e9, 100_000), "compute.fused_optimizer", None),
        (planted(4e9, 2_000), "compute.precision", None),
        (planted(4e9, 20), "compute.precision", "not tried: at most 0.1% to gain"),
        (planted(4e9, 20, spread=9.0), "compute.precision", None),  # rough rates say nothing
    ],
)
def test_the_option_with_the_largest_roofline_gain_comes_first(counts, first, skipped, clock):
    clock.set(has_bf16_units=with_bf16)
    # Nothing is faster, so each is compared with plain in turn.
    recipe = Recipe(compute={"rewrites": "off", "fused_norms": "off"})
    loop, compute, source = job(small_net(), lambda s: 0.1, clock, steps=2_000, recipe=recipe)
    loop.tuner.expect(counts)
    run(loop, compute, source)
    alone = [trial["b"] for trial in loop.tuning["trials"] if len(trial["b"]) == 1]
    assert list(alone[0]) == [first]
    assert loop.tuning["dropped"].get("compute.fused_optimizer") == skipped
    tried = {field for trial in loop.tuning["trials"] for field in trial["b"]}
    assert ("compute.fused_optimizer" in tried) == (skipped is None)
    if skipped:
        assert loop.resolved.choices["compute.fused_optimizer"].reason == skipped


def test_a_fit_hands_what_its_first_step_computes_to_the_roofline(monkeypatch):
    rates = {**planted(1e30, 0)["rates"], "calls_per_s": 1e30, "nodes_per_s": 1e30}
    rates["bytes_per_s"] = {p: {"memory": 1e30, "cache": 1e30} for p in ("fp32", "bf16")}
    rates["flops_per_s"] = {
        name: {kind: dict.fromkeys(of, 1e30) for kind, of in kinds.items()}
        for name, kinds in rates["flops_per_s"].items()
    }
    monkeypatch.setattr("flatout.train.counted.known_rates", lambda *machine: rates)
    monkeypatch.setattr("flatout.train.explanation.machine_rates", lambda *machine: rates)
    ticks = functools.partial(next, itertools.count(step=0.01))
    recipe = Recipe(memory={"allocator": "default"}, process={"threads": 1})
    trainer = flatout.Trainer(small_net(), recipe=recipe, say=lambda line: None)
    trainer.terms = dataclasses.replace(
        CALM, clock=ticks, cpu_clock=ticks, longest_s=1e9, before_share=1e9
    )
    history = trainer.fit(small_data(), batch_size=4, epochs=1, progress=False)
    why = history.tuning["dropped"]
    assert why["compute.memory_format"] == "not tried: at most 0.0% to gain"
    assert "not tried: at most 0.0% to gain" in history.explain()


def test_an_option_predicted_to_lose_is_not_tried_together_with_others(clock):
    """Alone it is tried all the same: the roofline is a model."""
    clock.set(has_bf16_units=with_bf16)
    loop, compute, source = job(
        small_net(), lambda s: 0.05 if s.precision == "bf16" else 0.1, clock, steps=6_000
    )
    loop.tuner.expect(planted(0.5e9, 2_000))
    run(loop, compute, source)
    assert "compute.precision" not in loop.tuning["trials"][0]["b"]
    assert loop.resolved.compute.precision == "bf16"


def test_the_rates_of_a_machine_are_measured_before_a_long_run_once(clock):
    asked = []
    clock.set(
        known_rates=lambda *machine: None, machine_rates=lambda *machine: asked.append(machine)
    )
    job(small_net(), lambda s: 0.1, clock, steps=2_000)
    assert not asked
    job(small_net(), lambda s: 0.1, clock, steps=6_000)
    assert asked == [("cpu", 1)]
    clock.set(known_rates=lambda *machine: {"spread": 1.1})
    job(small_net(), lambda s: 0.1, clock, steps=6_000)
    assert len(asked) == 1
    # On a busy machine they were rough.
    clock.set(known_rates=lambda *machine: {"spread": 2.0})
    job(small_net(), lambda s: 0.1, clock, steps=6_000)
    assert len(asked) == 2


def test_measurements_on_a_busy_machine_are_not_kept(clock, tmp_path):
    times = random.Random(0)
    clock.set(noise=0.2)
    said: list[str] = []
    tuned(small_net(), lambda s: 0.1 * (1 + 9 * times.random()), clock, said=said, steps=20_000)
    assert "busy" in said[0]
    assert not (tmp_path / "cache" / "auto").exists()


def test_a_damaged_cache_is_measured_again(clock, tmp_path):
    tuned(small_net(), lambda s: 0.1, clock)
    (entry,) = (tmp_path / "cache" / "auto").glob("*.toml")
    entry.write_text("compute = nonsense")
    loop = tuned(small_net(), lambda s: 0.1, clock)
    assert isinstance(loop.resolved, ResolvedRecipe)
    assert loop.tuning["done"]


def test_that_nothing_is_left_to_try_is_cached_too(clock):
    model = nn.Sequential(nn.Flatten(), nn.Linear(196, 10))
    tuning = tuned(copy.deepcopy(model), lambda s: 0.1, clock, allow="exact").tuning
    assert tuning["trials"] == []
    assert "too few" in tuning["dropped"]["memory.allocator"]
    allocator.default_memory()
    assert job(model, allow="exact")[0].tuner is None


def test_a_cache_that_cannot_be_written_is_no_error(clock, monkeypatch, tmp_path):
    for name in ("file", f"flatout-{os.geteuid()}"):  # the second is used where the first cannot be
        (tmp_path / name).write_text("")
    monkeypatch.setenv("FLATOUT_CACHE", str(tmp_path / "file"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert tuned(small_net(), lambda s: 0.1, clock).tuning["done"]


def test_a_short_run_tries_nothing():
    model, passes = small_net(), SimpleQueue()  # a check restores a list
    model.register_forward_pre_hook(lambda *_: passes.put(torch.is_grad_enabled()))
    said: list[str] = []
    loop, _, _ = job(model, steps=39, said=said)
    assert loop.resolved.summary() == "as plain PyTorch"
    assert "too short" in said[0]
    assert loop.tuner is None
    assert not any(passes.get() for _ in range(passes.qsize()))


def frozen_job(clock, seconds, *, samples=320, epochs=2, allow="tolerant"):
    """A short run of a model that is frozen in front.

    Args:
        seconds: of a sample's forward and backward, by precision.
    """
    model, said = small_net(), []
    model[:4].requires_grad_(False).eval()
    loop = Loop(allow=allow, say=said.append)
    loop.terms = clock.terms
    loop.progress.planned_epochs = epochs
    loop.identity.trainer = {}  # as a Trainer's: a Loop keeps no features

    def compute(batch):
        forward, backward = seconds[loop.stepper.switch.now.precision]
        clock.now += batch.size * forward
        output = model(batch.inputs).float()
        if output.requires_grad:
            output.register_hook(
                lambda _: vars(clock).update(now=clock.now + batch.size * backward)
            )
        return nn.functional.cross_entropy(output, batch.targets)

    source = as_source(small_data(samples), batch_size=32)
    optimizer = torch.optim.Adam(model[6].parameters())
    steps = epochs * source.steps
    assert steps < loop.terms.fewest_steps
    loop.prepare(model, optimizer, compute=compute, data=source, steps=steps)
    return loop, said


def test_frozen_layers_decide_the_precision_of_a_short_run(clock):
    clock.set(has_bf16_units=with_bf16)
    seconds = {"fp32": (0.06, 0.002), "bf16": (0.03, 0.002)}
    frozen_job(clock, seconds, allow="exact")
    without = clock.now
    loop, said = frozen_job(clock, seconds)
    assert loop.resolved.compute.precision == loop.stepper.switch.now.precision == "bf16"
    assert said[0].startswith("auto: bf16")
    assert said[0].endswith("the forward of the frozen layers takes 30 instead of 60 ms a sample")
    assert loop.resolved.choices["compute.precision"].parity is Parity.TOLERANT
    assert clock.now - 2 * without < 50 * 0.06


@pytest.mark.parametrize(
    ("seconds", "options"),
    [
        ({"fp32": (0.06, 0.002), "bf16": (0.06, 0.002)}, {}),  # not faster
        ({"fp32": (0.06, 0.002), "bf16": (0.03, 0.06)}, {"epochs": 3}),  # later epochs are slower
        ({"fp32": (0.002, 0.0), "bf16": (0.001, 0.0)}, {}),  # over in a moment
        ({"fp32": (0.06, 0.002), "bf16": (0.03, 0.002)}, {"epochs": 1}),
        ({"fp32": (0.06, 0.002), "bf16": (0.03, 0.002)}, {"samples": 64}),  # looking costs more
        ({"fp32": (0.06, 0.002), "bf16": (0.03, 0.002)}, {"allow": "exact"}),
    ],
)
def test_a_short_run_stays_in_full_precision_where_that_does_not_pay(seconds, options, clock):
    clock.set(has_bf16_units=with_bf16)
    loop, said = frozen_job(clock, seconds, **options)
    assert loop.resolved.compute.precision == loop.stepper.switch.now.precision == "fp32"
    reasons = "too short to repay measuring", "features of frozen layers are kept from the start"
    assert not said or any(reason in said[0] for reason in reasons)


@pytest.mark.parametrize("steps", [60, 150, 2000, None])
@pytest.mark.parametrize("plain_s", [0.04, 0.16, 3.0])
@pytest.mark.parametrize("factor", [0.125, 0.9, 1.2, 10.0])
def test_tuning_costs_its_share_whatever_a_step_takes(clock, steps, plain_s, factor):
    """Much faster options leave a shorter run; much slower ones are expensive to try."""

    def seconds(s):
        plain = (s.memory_format, s.fused_optimizer, s.rewrites) == ("contiguous", "off", "off")
        return plain_s * (1.0 if plain and s.precision == "fp32" else factor)

    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(288, 10))
    recipe = Recipe(memory={"allocator": "default"}, compute={"compile": "off"})
    loop, compute, source = job(model, seconds, clock, steps=steps, recipe=recipe)
    before = clock.now
    run(loop, compute, source, steps or 300)
    if loop.tuning is None:
        return
    chosen, record = seconds(loop.stepper.switch.now), loop.tuning
    run_s = max(20.0, clock.now - before) if steps is None else steps * chosen
    # What cannot be predicted is one pass of a few samples, and one step under each setting.
    assert record["before_first_step_s"] <= min(6.0, 0.1 * run_s) + plain_s / 16 * factor
    slower = [s for s in record["spans"] if s["settings"]] if factor > 1 else []
    assert record["lost_s"] <= 0.05 * run_s + plain_s * (factor - 1) * len(slower)
    assert chosen == plain_s * min(1, factor) or record["dropped"]
    assert chosen <= plain_s
    if factor > 1:
        lost = sum(s["last"] - s["first"] + 1 for s in slower) * plain_s * (factor - 1)
        assert record["lost_s"] == pytest.approx(lost, rel=0.02)


def test_the_record_tells_what_ran_in_which_steps(clock):
    loop = tuned(small_net(), lambda s: 0.1 if s.memory_format == "contiguous" else 0.02, clock)
    record = loop.tuning
    assert record["done"]
    assert record["why"] == ""
    edges = [(span["first"], span["last"]) for span in record["spans"]]
    assert edges[0][0] == 1
    assert edges[-1][1] == loop.step_count
    assert all(b[0] == a[1] + 1 for a, b in itertools.pairwise(edges))
    for trial in record["trials"]:
        ran = [
            span["settings"]
            for span in record["spans"]
            if trial["first"] <= span["last"] and span["first"] <= trial["last"]
        ]
        assert trial["a"] in ran
        assert trial["b"] in ran
    assert record["step_s"]["plain"] == pytest.approx(0.1, rel=0.01)
    assert record["step_s"]["chosen"] == pytest.approx(0.02, rel=0.01)


def test_a_last_batch_that_is_smaller_does_not_count(clock):
    """It takes a twentieth of the time, whatever the settings."""
    loop = tuned(small_net(), lambda s: 0.1, clock, data=small_data(131))
    assert loop.resolved.summary() == "as plain PyTorch"
    assert all(trial["ratio"] == pytest.approx(1, rel=0.01) for trial in loop.tuning["trials"])


def test_a_run_that_ends_first_keeps_what_was_proven(clock):
    said: list[str] = []
    loop, compute, source = job(
        small_net(), lambda s: 0.1 if s.memory_format == "contiguous" else 0.02, clock, said=said,
        recipe=Recipe(memory={"allocator": "default"}), steps=200,
    )  # fmt: skip
    run(loop, compute, source, 18)
    assert loop.tuner.is_searching
    loop.end_tuning()
    assert loop.resolved.compute.memory_format == "channels_last"
    assert "together" in loop.resolved.choices["compute.rewrites"].reason
    assert "the run ended before all settings were tried" in said[0]
    assert not loop.tuning["done"]
    loop.close()


@pytest.mark.parametrize("fails", [False, True])
def test_only_its_own_error_makes_a_run_a_failed_one(clock, fails):
    """One may begin in an `except` block, and end in `finally` behind an error of its own."""
    said: list[str] = []
    with contextlib.suppress(KeyError):
        try:
            raise ValueError("before")
        except ValueError:
            loop, compute, source = job(
                small_net(), lambda s: 0.1, clock, said=said, steps=200,
                recipe=Recipe(memory={"allocator": "default"}),
            )  # fmt: skip
            try:
                run(loop, compute, source, 18)
                assert loop.tuner.is_searching
                if fails:
                    raise KeyError("in training")
            finally:
                loop.close()
    assert loop.tuner.is_searching == fails
    assert any("the run ended" in line for line in said) != fails


def test_a_machine_that_becomes_busy_is_measured_again(clock):
    """Two threads wait for one another then; in the end one is faster for good."""
    torch.set_num_threads(1)
    busy: list[int] = []

    def seconds(s):
        slow = 3.0 if busy else 1.0
        layout = 0.5 if (s.memory_format == "channels_last") != bool(busy) else 1.0
        return 0.1 * slow * layout

    said: list[str] = []
    loop, compute, source = job(small_net(), seconds, clock, said=said, steps=3_000)
    run(loop, compute, source)
    assert loop.resolved.compute.memory_format == "channels_last"
    busy.append(1)
    while loop.step_count < 1_200:
        for batch in loop.batches(source):
            loop.step(compute, batch)
        loop.finish_epoch()
    assert any(": settings are tried once more" in line for line in said)
    assert loop.resolved.compute.memory_format == "contiguous"
    assert loop.tuning["spans"][-1]["settings"].get("compute.memory_format") is None
    spans = loop.tuning["spans"]
    assert all(b["first"] == a["last"] + 1 for a, b in itertools.pairwise(spans))


def test_a_machine_that_stays_busy_keeps_earlier_choices(clock, tmp_path):
    clock.set(noise=0.2)
    others, busy = random.Random(1), []

    def seconds(s):
        layout = 0.8 if s.memory_format == "channels_last" else 1.0
        return 0.1 * layout * (3 + 6 * others.random() if busy else 1.0)

    said: list[str] = []
    loop, compute, source = job(small_net(), seconds, clock, said=said, steps=6_000)
    run(loop, compute, source)
    (kept,) = (tmp_path / "cache" / "auto").glob("*.toml")
    chosen, answer = loop.stepper.switch.now, kept.read_text()
    assert chosen.memory_format == "channels_last"
    busy.append(1)
    while len(said) < 3:
        for batch in loop.batches(source):
            loop.step(compute, batch)
        loop.finish_epoch()
    assert "settings are tried once more" in said[1]
    assert said[2].startswith("auto: channels_last")
    assert ", as before; " in said[2]
    assert "the machine is busy, so the next run measures again" in said[2]
    assert loop.stepper.switch.now == chosen
    reason = loop.resolved.choices["compute.memory_format"].reason
    assert reason.endswith(auto_search._BUSY)
    assert kept.read_text() == answer


def test_a_pace_that_changes_late_in_a_run_changes_no_setting(clock, tmp_path):
    busy: list[int] = []

    def seconds(s):
        return 0.1 * (3.0 if busy else 1.0) * (0.5 if s.memory_format == "channels_last" else 1.0)

    said: list[str] = []
    loop, compute, source = job(small_net(), seconds, clock, said=said, steps=400)
    run(loop, compute, source)
    chosen = loop.stepper.switch.now
    assert chosen.memory_format == "channels_last"
    (kept,) = (tmp_path / "cache" / "auto").glob("*.toml")
    answer = kept.read_text()
    while loop.step_count < 400:
        for batch in loop.batches(source):
            if loop.step_count == 210:
                busy.append(1)
            loop.step(compute, batch)
        loop.finish_epoch()
    assert "settings are tried once more" in said[1]
    assert said[2].startswith("auto: channels_last")
    assert ", as before: the run is half over; " in said[2]
    assert "measured" not in said[2]
    assert loop.stepper.switch.now == chosen
    assert kept.read_text() == answer
    loop.close()


def test_other_parameters_that_train_are_measured_again(clock):
    model = small_net()
    model[0].weight.requires_grad_(False)

    def seconds(s):
        trains = model[0].weight.requires_grad
        if s.memory_format == "channels_last":
            return 0.05 if trains else 1.0
        return 0.1

    said: list[str] = []
    loop, compute, source = job(model, seconds, clock, said=said, steps=3_000)
    run(loop, compute, source)
    assert loop.resolved.compute.memory_format == "contiguous"
    assert "compute.memory_format" in loop.tuning["dropped"]
    model[0].weight.requires_grad_(True)
    while loop.step_count < 1_000:
        for batch in loop.batches(source):
            loop.step(compute, batch)
        loop.finish_epoch()
    assert "other parameters train than before" in said[1]
    assert loop.resolved.compute.memory_format == "channels_last"
    assert "compute.memory_format" not in loop.tuning["dropped"]


def test_parameters_that_begin_to_train_within_an_epoch_are_noticed_there(clock):
    model = small_net()
    model[0].weight.requires_grad_(False)
    data = small_data(64 * 120)
    loop, compute, source = job(model, lambda s: 0.1, clock, steps=3_000, data=data)
    run(loop, compute, source)
    assert loop.progress.job_changes == 0
    for number, batch in enumerate(loop.batches(source)):
        model[0].weight.requires_grad_(number > 0)
        loop.step(compute, batch)
        if loop.progress.job_changes:
            break
    assert loop.progress.job_changes == 1
    assert number < 119


def thawing(clock, said, steps=3_000, until=800, thaw_at=0, **options):
    """A job whose first layer trains from some step on; channels_last is faster only then."""
    model = small_net()
    model[0].weight.requires_grad_(False)

    def seconds(s):
        trains = model[0].weight.requires_grad
        return 0.05 if (s.memory_format == "channels_last") == trains else 0.1

    loop, compute, source = job(model, seconds, clock, said=said, steps=steps, **options)
    run(loop, compute, source)
    while loop.step_count < until:
        model[0].weight.requires_grad_(loop.step_count >= thaw_at)
        for batch in loop.batches(source):
            loop.step(compute, batch)
        loop.finish_epoch()
    return loop


@pytest.mark.slow
def test_what_is_found_after_a_thaw_is_kept_for_the_job_that_it_is(clock, tmp_path):
    said: list[str] = []
    first = thawing(clock, said)
    kept = sorted((tmp_path / "cache/auto").glob("*.toml"), key=lambda path: path.stat().st_mtime)
    formats = [loads(path.read_text()).compute.memory_format for path in kept]
    assert formats == ["contiguous", "channels_last"]
    trials = first.tuning["trials"]
    assert all(b["first"] > a["last"] for a, b in itertools.pairwise(trials))
    spans = first.tuning["spans"]
    assert spans[0]["first"] == 1
    assert all(b["first"] == a["last"] + 1 for a, b in itertools.pairwise(spans))

    said.clear()
    again = thawing(clock, said, until=60, thaw_at=40)
    assert again.tuner is None
    assert again.resolved.compute.memory_format == "channels_last"
    assert again.stepper.switch.now.memory_format == "channels_last"
    assert again.feed.channels_last
    assert [line.rpartition("from the ")[2] for line in said] == ["cache)", "cache)"]
    assert said[1].startswith("other parameters train than before; auto: channels_last")


@pytest.mark.slow
def test_a_search_that_a_thaw_ends_is_not_kept(clock, tmp_path):
    """It was of a job that no longer is."""
    model = small_net()
    model[0].weight.requires_grad_(False)
    loop, compute, source = job(model, lambda s: 0.1, clock, steps=3_000)
    for batch in loop.batches(source):
        loop.step(compute, batch)
    loop.finish_epoch()
    model[0].weight.requires_grad_(True)
    run(loop, compute, source)
    assert loop.tuner.done
    assert len(list((tmp_path / "cache/auto").glob("*.toml"))) == 1


def test_settings_stay_where_few_steps_are_left_after_a_thaw(clock):
    said: list[str] = []
    recipe = Recipe(compute={"memory_format": "channels_last"})
    loop = thawing(clock, said, steps=420, until=420, thaw_at=400, recipe=recipe)
    assert loop.stepper.switch.now.memory_format == "channels_last"
    assert not any("other parameters" in line for line in said)


def test_what_was_stopped_before_its_first_block_is_tried_later(clock):
    model = small_net()
    model[0].weight.requires_grad_(False)
    loop, compute, source = job(
        model, lambda s: 0.05 if s.memory_format == "channels_last" else 0.1, clock, steps=3_000
    )
    loop.tuner.stop("features wait")
    model[0].weight.requires_grad_(True)
    while loop.step_count < 600:
        for batch in loop.batches(source):
            loop.step(compute, batch)
        loop.finish_epoch()
    assert loop.resolved.compute.memory_format == "channels_last"


def of_lengths(seconds, clock, said=None):
    """A prepared Loop over batches of 16 to 256 tokens, whose steps take what a function says."""
    lengths = torch.randint(16, 257, (200,), generator=torch.Generator().manual_seed(0)).tolist()
    torch.manual_seed(0)
    model = nn.Linear(8, 3)
    loop = Loop(say=(said.append if said is not None else lambda line: None))
    loop.terms = clock.terms

    def batches():
        for length in lengths:
            yield torch.randn(16, length, 8), torch.randint(0, 3, (16,))

    def compute(batch):
        clock.now += seconds(loop.stepper.switch.now, batch.inputs.shape[1])
        return nn.functional.cross_entropy(model(batch.inputs).mean(1), batch.targets)

    source, optimizer = as_source(batches), torch.optim.Adam(model.parameters())
    loop.prepare(model, optimizer, compute=compute, data=source, steps=2_000)
    return run(loop, compute, source), compute, source


@pytest.mark.parametrize(
    ("fixed", "each", "pairs", "off"), [(0.0, 1e-3, 0.0, 0.01), (0.05, 1e-3, 1e-5, 0.03)]
)
def test_sequences_of_changing_length_are_compared_by_their_length(fixed, each, pairs, off, clock):
    """Steps that take so long for any batch, for each token, and for each pair of tokens."""

    def seconds(s, length):
        faster = 0.8 if s.fused_optimizer == "on" else 1.0
        return faster * (fixed + each * length + pairs * length**2)

    loop, _, _ = of_lengths(seconds, clock)
    assert loop.resolved.compute.fused_optimizer == "on"
    fused = {"compute.fused_optimizer"}
    trials = [one for one in loop.tuning["trials"] if set(one["b"]) - set(one["a"]) == fused]
    assert trials
    for trial in trials:
        assert trial["ratio"] == pytest.approx(1.25, rel=off)
        assert trial["floor"] < off


def test_short_and_long_sequences_may_run_under_settings_of_their_own(clock, tmp_path):
    """bf16 loses for short ones; what it costs to switch is in what the steps take."""
    clock.set(has_bf16_units=with_bf16)
    switching, before = [0.0], []

    def seconds(s, length):
        took = 1e-3 * length * (1.0 if s.precision == "fp32" else 0.5 if length > 100 else 2.0)
        switched = bool(before) and before[-1] != s.precision
        before.append(s.precision)
        return took + switched * switching[0]

    loop, compute, source = of_lengths(seconds, clock)
    split = loop.tuner.search.by_length
    assert loop.resolved.compute.precision == "bf16"  # the best for all
    assert (split.short.precision, split.long.precision) == ("fp32", "bf16")
    assert 80 * 16 * 8 < split.most < 130 * 16 * 8
    ran = {}
    for batch in loop.batches(source):
        loop.step(compute, batch)
        ran.setdefault(loop.stepper.switch.now.precision, []).append(batch.inputs.shape[1])
    assert max(ran["fp32"]) <= split.most / 128 < min(ran["bf16"])
    with loop.autocast():  # an evaluation has one for all
        assert torch.is_autocast_enabled("cpu")
    assert "fp32" not in loop.notes()[-1]
    (last,) = [trial for trial in loop.tuning["trials"] if len(trial["b"]) > len(trial["a"])][-1:]
    assert last["chosen"] == "b"
    assert any(key.startswith("up to") for key in loop.tuning["spans"][-1]["settings"])
    # The next run has both from the cache.
    said: list[str] = []
    again, compute, source = of_lengths(seconds, clock, said=said)
    assert again.tuner.search.by_length == split
    assert not again.tuner.is_searching
    assert "from the cache); " in said[0]
    assert said[0].endswith(split.words(loop.tuner.search.plain))
    ran.clear()
    for batch in itertools.islice(again.batches(source), 50):
        again.step(compute, batch)
        ran.setdefault(again.stepper.switch.now.precision, []).append(batch.inputs.shape[1])
    assert max(ran["fp32"]) <= split.most / 128 < min(ran["bf16"])
    assert again.tuning["trials"] == []
    assert again.tuning["spans"][0]["settings"] == loop.tuning["spans"][-1]["settings"]
    (kept,) = (tmp_path / "cache" / "auto").glob("*.lengths.json")
    kept.write_text("{}")
    switching[0] = 1.0
    assert of_lengths(seconds, clock)[0].tuner.search.by_length is None


def test_a_compiled_model_is_measured_before_the_first_step(clock):
    """What torch.compile would take again and again is stood in for: the model is only marked."""
    model = small_net(dropout=0.1)
    model[1]._compiled_call_impl = model[1]._call_impl
    before = copy.deepcopy(model.state_dict())
    randoms = torch.get_rng_state()

    def seconds(s):
        return 0.01 if s.fused_optimizer == "on" else 0.02

    said: list[str] = []
    loop, compute, source = job(model, seconds, clock, said=said)
    assert not loop.tuner.is_searching
    assert loop.resolved.compute.fused_optimizer == "on"
    assert loop.step_count == 0
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert torch.equal(randoms, torch.get_rng_state())
    run(loop, compute, source)
    for batch in loop.batches(source):
        loop.step(compute, batch)
    (span,) = loop.tuning["spans"]
    assert (span["first"], span["last"]) == (1, 4)
    assert span["settings"]["compute.fused_optimizer"] == "on"


@pytest.mark.parametrize(("plain_s", "forwards"), [(0.3, 2), (6.0, 1)])
def test_a_batch_that_takes_long_runs_once_before_the_first_step(plain_s, forwards, clock):
    model, sizes = small_net(), SimpleQueue()  # a check restores a list
    model.register_forward_pre_hook(lambda module, inputs: sizes.put(len(inputs[0])))
    loop, _, _ = job(model, lambda s: plain_s, clock, steps=1_000)
    assert [sizes.get() for _ in range(sizes.qsize())].count(64) == forwards
    # A forward pass takes a third of a step; what few samples take comes on top.
    assert plain_s / 3 <= loop.tuner.search.budget.before_s <= 6
    assert loop.tuner.search.budget.step_s == pytest.approx(plain_s)


@pytest.mark.parametrize("update_s", [0.0, 0.078])
def test_the_length_of_a_run_counts_its_updates(update_s, clock, monkeypatch):
    """Passes of 5 ms: 150 steps take 0.75 s of them, and 12 s with a dense update of tables."""
    monkeypatch.setattr(auto_check, "seconds_of_update", lambda *given: update_s)
    passes = SimpleQueue()  # a check restores a list

    def seconds(s):
        passes.put(1)
        return 8.0 if passes.qsize() == 2 else 0.005  # what is made once takes long

    said: list[str] = []
    loop, _, _ = job(small_net(), seconds, clock, steps=150, said=said)
    if update_s:
        budget = loop.tuner.search.budget
        assert budget.step_s == pytest.approx(0.083)
        assert budget.run_s == pytest.approx(150 * 0.083)
    else:
        assert said == [
            "auto: as plain PyTorch; a run of 150 steps is too short to repay measuring"
        ]


def test_the_length_of_a_run_counts_its_input(clock, monkeypatch):
    peek = ArraySource.peek

    def slow(self, count):
        clock.now += 0.03 * count
        return peek(self, count)

    monkeypatch.setattr(ArraySource, "peek", slow)
    monkeypatch.setattr(auto_check, "seconds_of_update", lambda *given: 0.0)
    loop, compute, source = job(small_net(), lambda s: 0.05, clock, steps=600, accumulate=2)
    budget = loop.tuner.search.budget
    assert (budget.step_s, budget.input_s) == pytest.approx((0.1, 0.06))
    # The first batches take longer than others: they count for no more than all else of a step.
    loop, compute, source = job(small_net(), lambda s: 0.02, clock, steps=600)
    budget = loop.tuner.search.budget
    assert (budget.step_s, budget.input_s) == pytest.approx((0.02, 0.02))
    # Then it is what steps do wait.
    clock.waited_s = 0.5
    run(loop, compute, source, 40)
    assert budget.run_s == pytest.approx(600 * (budget.step_s + 0.5))


def test_what_is_too_slow_to_look_at_says_so(clock):
    """As where others keep the machine busy; the run is not too short."""
    said: list[str] = []
    loop, _, _ = job(small_net(), lambda s: 30.0, clock, steps=1_000, said=said)
    assert loop.tuner is None
    assert said == ["auto: as plain PyTorch; " + auto._TOO_SLOW]


def test_a_run_of_unknown_length_is_tuned_once_it_lasts(clock):
    loop, compute, source = job(
        small_net(), lambda s: 0.05 if s.memory_format == "contiguous" else 0.02, clock, steps=None
    )
    run(loop, compute, source, 18)
    assert [span["settings"] for span in loop.tuning["spans"]] == [{}]
    run(loop, compute, source)
    assert loop.resolved.compute.memory_format == "channels_last"


def test_compiling_has_to_fit_into_the_share(clock):
    """A model of many modules may take longer to compile than its share of the run."""
    many = nn.Sequential(*(nn.Identity() for _ in range(60)), small_net())
    loop = tuned(many, lambda s: 0.1, clock, steps=25_000)
    assert "too short to repay" in loop.resolved.choices["compute.compile"].reason


def test_compiling_is_for_long_runs(clock, monkeypatch):
    def seconds(s):
        return 0.02 if s.compile == "on" else 0.1

    short = tuned(small_net(), seconds, clock, steps=1_000)
    assert short.resolved.compute.compile == "off"
    assert "too short to repay" in short.resolved.choices["compute.compile"].reason
    monkeypatch.setattr(nn.Module, "compile", lambda self: None)  # the decision, not the compiler
    long = tuned(small_net(), seconds, clock, steps=1_000_000)
    assert long.resolved.compute.compile == "on"
    assert "compiled in" in long.resolved.choices["compute.compile"].reason

    def spoil(self):
        self._compiled_call_impl = lambda x: self.forward(x).flip(1)

    monkeypatch.setattr(nn.Module, "compile", spoil)
    wrong = tuned(nn.Sequential(small_net(), nn.ReLU()), seconds, clock, steps=1_000_000)
    assert wrong.resolved.compute.compile == "off"
    assert "more than rounding" in wrong.resolved.choices["compute.compile"].reason


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
        "input.on_device": ("off", "no GPU"),
        "world.device": ("cpu", "asked for"),
    }
    for field in FIELDS:
        if Recipe().get(field) == "auto":
            assert chosen[field] == special.get(field, (PLAIN.get(field), "plain"))


def test_bf16_is_left_once_it_changes_gradients(clock):
    """As where they have become so small that they are mostly rounding."""
    clock.set(has_bf16_units=with_bf16)
    model, said = _InHalf(_other_values, samples=1_000), []
    loop, compute, source = job(
        model, lambda s: 0.01 if s.precision == "bf16" else 0.1, clock, steps=4_000, said=said
    )
    run(loop, compute, source)
    assert loop.resolved.compute.precision == "bf16"
    before, model.samples = loop.step_count, 0
    while loop.resolved.compute.precision == "bf16" and loop.step_count < 2 * before + 1_200:
        for batch in loop.batches(source):
            loop.step(compute, batch)
        loop.finish_epoch()
    assert not torch.is_autocast_enabled("cpu")
    assert loop.stepper.switch.now.precision == loop.resolved.compute.precision == "fp32"
    spans = loop.tuning["spans"]
    assert spans[-2]["settings"]["compute.precision"] == "bf16"
    assert "compute.precision" not in spans[-1]["settings"]
    assert all(a["last"] + 1 == b["first"] for a, b in itertools.pairwise(spans))
    assert spans[-1]["last"] == loop.step_count
    assert "more than rounding" in loop.tuning["dropped"]["compute.precision"]
    assert sum("steps run in fp32" in line for line in said) == 1


def test_metrics_do_not_count_what_is_looked_at_on_a_step(clock):
    loop, compute, source = job(small_net(), lambda s: 0.1, clock)
    search, within, asked = loop.tuner.search, [False], []
    search.unchecked, check = [*search.options], search.check

    @contextlib.contextmanager
    def uncounted():
        within[0] = True
        yield
        within[0] = False

    def watched(*given):
        asked.append(within[0])
        return check(*given)

    loop.trainer.uncounted, search.check = uncounted, watched
    run(loop, compute, source)
    assert asked
    assert all(asked)


class _TwoAlike:
    """A World in which another rank has found the same."""

    def gather(self, value, what=""):
        return [messages.unpack(messages.pack(value)) for _ in range(2)]


@pytest.mark.parametrize("fastest", [None, frozenset({"compute.precision"})])
def test_ranks_agree_on_what_was_fastest_of_long_steps(fastest):
    search = auto_search.Search(Settings(), [], Budget(600), fastest=fastest)
    auto.agree(auto.Decision(None, search), _TwoAlike())
    assert search.fastest == fastest
