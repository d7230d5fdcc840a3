"""What observing costs is counted wherever the script stands."""

from inspect import signature
from itertools import product
from random import Random
from threading import get_ident
from types import SimpleNamespace

import pytest
import torch

from flatout.observe import cost
from flatout.observe.lanes import EVALUATION, FORWARD, Lanes
from flatout.observe.numbers import Numbers
from flatout.observe.outputs import Told
from flatout.observe.round_trips import RoundTrips
from flatout.observe.tensors import watch_syncs
from flatout.observe.watch import Watch


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_it_is_counted_in_an_evaluation_too(mode, monkeypatch):
    timed = cost._extra_ns
    # Of so few it may be none: the clock is not what is tested.
    monkeypatch.setattr(cost, "_extra_ns", lambda *calls: timed(*calls) + 1)
    cost._once.cache_clear()
    watch = Watch()
    watch.lanes.steps = 10
    watch.calls.noted = 10
    with mode():
        assert cost.added(watch, 0.0).us_per_step > 0
    cost._once.cache_clear()


def test_hooks_that_ran_in_the_first_steps_alone_are_no_part_of_each_step(monkeypatch):
    monkeypatch.setattr(cost, "_once", lambda hook, *kind: 1e6 if hook is cost._call_ns else 2e6)
    watch = Watch()
    watch.lanes.steps = 10
    watch.calls.noted = 20
    first = cost.hooks_ran(watch)
    watch.lanes.steps, watch.calls.noted, watch.calls.sought = 100, 120, 50
    assert cost.added(watch, 0.0, 0.0, first) == (2000.0, 20.0)


def test_what_other_work_takes_is_no_hooks(monkeypatch):
    now, random = 0, Random(0)

    def passes(ns):
        nonlocal now
        disturbed = 10_000_000 if random.random() < 0.4 else 0
        now += ns + random.randrange(200) + disturbed

    monkeypatch.setattr(cost, "thread_time_ns", lambda: now)
    monkeypatch.setattr(cost, "_wanted", lambda ns: 30)
    monkeypatch.setattr(cost, "_work", lambda: lambda: passes(75_000))
    took = cost._extra_ns(lambda: passes(3_000), lambda: passes(1_000))
    assert took == pytest.approx(2_000, abs=150)


def test_what_threads_of_ours_take_while_a_script_evaluates_is_no_steps(monkeypatch):
    watch = Watch()
    watch.lanes.steps = 10
    monkeypatch.setattr(Lanes, "step_ns", lambda self: 9 * [50_000_000] + [550_000_000])
    spent = watch.lanes.spent
    spent[FORWARD], spent[EVALUATION] = 1_000_000_000, 3_000_000_000
    watch.lanes.spent = spent
    # A hundredth of the time: of one of the many steps, not of the long one.
    assert cost.added(watch, aside_seconds=0.04, first_seconds=0.5) == (500.0, 500.0)


@pytest.mark.parametrize(
    "name", [name for name in vars(cost) if name[0] == "_" and name.endswith("_ns")]
)
def test_each_hook_can_be_timed(name):
    if name != "_extra_ns":
        state = torch.get_rng_state()
        hook = getattr(cost, name)
        for kind in product([False, True], repeat=len(signature(hook).parameters)):
            assert 0 <= hook(*kind) < 1e8
        assert torch.equal(torch.get_rng_state(), state)  # it is the script's


def test_what_is_called_too_often_is_timed_in_the_first_steps_alone():
    watch = Watch()
    syncs = watch_syncs(torch, watch, RoundTrips(watch))
    tensor = torch.ones(1)
    try:
        watch.lanes.steps = 25
        float(tensor)
        for _ in range(2000):
            tensor.item()
        watch.lanes.spent = [10**6] * len(watch.lanes.spent)
        syncs.weigh()
        tensor.item()
        tensor.tolist()
        watch.lanes.steps = 100
        told = {call.kind: call for call in watch.calls.all() if call.count > 10}
        assert told["item"].count == 4 * 2000
        assert told["item"].detail["watched_steps"] == 25
        assert watch.calls.count("tolist") == 1  # which is rare
        assert watch.calls.noted_once == 2001
        assert [note for note in watch.notes if "80 calls a step are too many" in note]
    finally:
        syncs.remove()


def test_what_is_timed_in_some_steps_is_timed_in_later_ones_too():
    watch = Watch()
    syncs = watch_syncs(torch, watch, RoundTrips(watch))
    syncs.most_share = 0.0  # of no clock's time
    lanes, tensor, plain = watch.lanes, torch.ones(1), torch.Tensor.item.__wrapped__
    lanes.thread = get_ident()
    timed = []
    try:
        for step in range(1, 131):
            for _ in range(1 if step <= 50 else 3):
                lanes.switch(FORWARD)
                tensor.item()
            lanes.steps = step
            watch.attend()
            timed += [step] if torch.Tensor.item is not plain else []
            if step == 105:
                (call,) = watch.calls.all()
                assert (call.detail["watched_steps"], call.steps) == (40, round(39 / 40 * 105))
        # Up to the 25th, and ten behind the 50th and the 100th.
        assert timed == [*range(1, 25), *range(50, 60), *range(100, 110)]
        (call,) = watch.calls.all()
        # The first step is none of those that are counted.
        assert (call.detail["watched_steps"], call.steps) == (45, round(44 / 45 * 130))
        assert call.count == round((24 + 20 * 3) * 130 / 45)
        assert [(one.since, one.until) for one in lanes._unseen] == [
            (25, 50),
            (60, 100),
            (110, None),
        ]
        assert watch.calls.noted == watch.calls.noted_once  # none is a part of each step
    finally:
        syncs.remove()


def test_what_tells_too_often_is_timed_in_the_first_steps_alone():
    watch, owner = Watch(), SimpleNamespace(add_scalar=lambda name: None, print=lambda text: None)
    plain = owner.add_scalar
    told = Told(watch)
    told.time(owner, "add_scalar", "log", {"logged": True})
    told.time(owner, "print", "print")
    watch.lanes.thread, watch.lanes.steps = get_ident(), 25
    owner.print("once")
    watch.lanes.switch(FORWARD)
    for _ in range(2000):
        owner.add_scalar("loss")
    told.calls.weigh()
    assert owner.add_scalar is plain
    owner.add_scalar("loss")
    owner.print("again")
    watch.lanes.steps = 100
    (often,) = [call for call in watch.calls.all() if call.kind == "log"]
    assert (often.count, often.detail["watched_steps"]) == (8000, 25)
    assert watch.calls.count("print") == 2  # which is rare
    assert [note for note in watch.notes if "80 calls a step are too many" in note]
    watch.renew()
    assert owner.add_scalar is not plain


def test_weights_are_read_before_saves_that_are_far_apart_alone(monkeypatch):
    watch = Watch()
    numbers = Numbers(torch, watch)
    now = 10**9
    monkeypatch.setattr("flatout.observe.numbers.perf_counter_ns", lambda: now)
    looks = []
    monkeypatch.setattr(numbers, "look", lambda: looks.append(now))
    numbers._took = 10**6  # a thousandth of a second
    for _ in range(50):
        watch.aside(*watch.before_saving)
        now += 10**8
    assert len(looks) == 3 + 4  # the first three, and one in each second


def test_looks_that_were_planned_before_are_no_part_of_each_step():
    watch, looked = Watch(), []

    def look():
        looked.append(watch.lanes.steps)

    watch.at(24, look)
    watch.optimizers.append(object())
    watch.lanes.steps = 24
    watch.attend()
    once_ns = watch.once_ns
    assert once_ns > 0
    assert watch.looking_ns == 0
    watch.at(48, look)  # as what looks again and again
    watch.lanes.steps = 48
    watch.attend()
    assert watch.once_ns == once_ns
    assert watch.looking_ns > 0
    assert looked == [24, 48]
    watch.lanes.last = watch._since  # as if no other work had taken time between them
    assert not watch.affords(0)  # both have taken more than their share


def test_counting_takes_seconds_at_most_where_each_step_waits_for_a_cpu(monkeypatch):
    now = 0

    def clock():
        nonlocal now
        now += 400_000_000
        return now

    calls = []
    monkeypatch.setattr(cost, "perf_counter_ns", clock)
    assert cost._extra_ns(lambda: calls.append("hooked"), lambda: None) >= 0.0
    assert now == 2.4e9
    assert len(calls) == 2 * 4
