"""The clock of lanes: in C and in Python, which must do the same."""

import gc
import subprocess
import sys
import threading
import time
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flatout.kernels import clock, clock_fallback
from flatout.kernels.clock_fallback import AFTER, EVALUATION, FORWARD, HOST, INPUT, KEPT, SAVING

KINDS = [clock_fallback.Clock]
if clock.available():
    KINDS.append(clock.Clock)
each_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__module__)


OPERATIONS = st.one_of(
    st.tuples(st.sampled_from(["switch", "enter", "leave_backward"]), st.integers(0, 11)),
    st.tuples(st.just("shift"), st.integers(0, 99), st.integers(0, 11), st.integers(0, 11)),
    st.tuples(st.just("lap"), st.booleans()),
    st.tuples(st.sampled_from(["enter_model", "ask", "take", "mark", "unmark", "leave_step"])),
)
LEADS_TO = {"ask": INPUT, "take": FORWARD, "leave_step": HOST}


@each_kind
@given(st.lists(OPERATIONS))
def test_no_time_is_lost_or_counted_twice(kind, operations):
    before = time.perf_counter_ns()
    one = kind()
    first, current = one.last, HOST
    assert before <= first <= time.perf_counter_ns()
    for name, *given_ in operations:
        said = getattr(one, name)(*given_)
        if name in ("switch", "enter", "leave_backward"):
            assert said == current
            current = given_[0]
        current = LEADS_TO.get(name, current)
        assert one.current == current
        assert sum(one.spent) == one.last - first
        one.is_inside = False
    assert one.last <= time.perf_counter_ns()
    assert len(one.step_ns()) == one.steps


@given(st.lists(st.tuples(OPERATIONS, st.integers(0, 1000)), max_size=60))
def test_both_do_the_same(calls):
    """Of time that a test gives: `last` is set so that nothing passes but for what is shifted."""
    said = []
    for kind in KINDS:
        one, seen = kind(), []
        for (name, *given_), ns in calls:
            seen.append(getattr(one, name)(*given_))
            if name == "take":
                assert seen.pop() >= 0
            if name == "leave_step":  # its own time is what the machine makes of it
                one.__init__()
            one.spent = [0] * 12 if name not in ("shift", "lap", "mark", "unmark") else one.spent
            one.shift(ns, INPUT, EVALUATION)
            one.last = one.began + 7 * ns
            one.due, one.is_open = ns % 7, ns % 3 == 0
            seen.append((one.current, one.steps, one.backwards, one.is_inside))
            if name == "lap":
                seen.append((one.spent, one.step_ns(), one.between))
            if name in ("mark", "unmark", "lap"):
                seen.append((one.before, one.seen_backwards))
        said.append(seen)
    assert all(other == said[0] for other in said)


@each_kind
def test_time_goes_to_the_lane_that_ran(kind):
    one = kind()
    one.last -= 20_000_000
    assert one.switch(1) == HOST
    one.last -= 40_000_000
    assert one.enter(2) == 1
    spent = [ns / 1e9 for ns in one.spent]
    assert spent[HOST] >= 0.02
    assert spent[1] >= 0.04
    assert spent[2] == 0
    one.last -= 5_000_000_000  # as of someone who leaves time out
    one.switch(0)
    assert one.spent[2] >= 5_000_000_000


@each_kind
def test_steps_and_what_lies_between_them(kind):
    one = kind()
    one.last = one.began + 100
    one.shift(30, HOST, SAVING)
    one.lap(False)
    assert one.first == one.spent
    assert (one.steps, one.step_ns(), one.between) == (1, [70], 30)
    one.last = one.began + 50
    one.lap(True)
    assert (one.steps, one.step_ns()) == (1, [120])
    one.last = one.began + 10
    one.lap(False)
    assert (one.steps, one.step_ns()) == (2, [120, 10])
    assert one.began == one.last


@each_kind
def test_between_two_backward_passes_is_the_hosts_time(kind):
    one = kind()
    one.spent = [0] * 12
    for passes, after, host in ((1, 40, 0), (2, 40, 60), (1, 50, 60)):
        one.backwards = passes
        one.shift({1: after - one.spent[AFTER], 2: 60}[passes], FORWARD, AFTER)
        one.lap(False)
        assert (one.spent[AFTER], one.spent[HOST]) == (after, host)
        assert one.backwards == 0


@each_kind
def test_the_latest_steps_are_kept(kind):
    one = kind()
    for step in range(2 * KEPT + 5):
        one.last = one.began + step
        one.lap(False)
        if step == KEPT - 1:
            assert one.step_ns() == list(range(KEPT))
    assert one.step_ns() == list(range(KEPT + 5, 2 * KEPT + 5))


@each_kind
def test_a_batch_is_asked_for_and_taken(kind):
    one = kind()
    assert one.ask() == 1  # nothing has begun: there is more to decide
    assert (one.current, one.before) == (INPUT, None)
    assert one.ask() == -1  # while one is made
    time.sleep(0.02)
    assert one.take() >= 20_000_000
    assert one.current == FORWARD
    assert one.spent[INPUT] >= 20_000_000
    one.backwards = 2
    assert one.ask() == 0
    assert (one.before, one.seen_backwards) == (one.spent, 2)
    one.take()
    one.is_open = True
    assert one.ask() == 1
    one.unmark()
    assert one.before is None


@each_kind
def test_a_step_that_is_due_says_so(kind):
    one = kind()
    assert not one.lap(False)
    one.due = 3
    one.mark()
    assert one.leave_step() == 0
    assert (one.current, one.steps, one.before) == (HOST, 2, None)
    assert one.leave_step() == 1
    one.due = 9
    one.until = one.last
    assert one.lap(True)
    one.thread = 0
    assert one.leave_step() == -1
    assert one.steps == 3


@each_kind
def test_only_the_outermost_model_is_entered(kind):
    one = kind()
    assert one.enter_model() == HOST
    assert one.is_inside
    assert one.enter_model() == -1
    one.is_inside = False
    one.current = INPUT
    assert one.enter_model() == -1
    assert not one.is_inside
    one.current, one.thread = FORWARD, 0
    assert one.enter_model() == -1


@each_kind
def test_another_thread_changes_nothing(kind):
    def calls(one):
        return [one.enter(1), one.enter_model(), one.ask(), one.leave_step()]

    one = kind()
    said = []
    thread = threading.Thread(target=lambda: said.extend(calls(one)))
    thread.start()
    thread.join()
    assert said == [-1, -1, -1, -1]
    assert (one.current, one.spent) == (HOST, [0] * 12)
    assert one.thread == threading.get_ident()
    one.thread = 0
    assert one.enter(1) == -1
    assert one.switch(1) == HOST


@each_kind
def test_it_starts_over(kind):
    one = kind()
    one.switch(1)
    one.lap(False)
    one.enter_model()
    one.__init__()
    assert (one.spent, one.first) == ([0] * 12, [0] * 12)
    assert (one.current, one.steps, one.step_ns()) == (HOST, 0, [])
    assert not one.is_inside


@each_kind
def test_a_lane_that_is_none_is_an_error_and_costs_nothing(kind):
    one = kind()
    last = one.last
    for lane in (-1, 12):
        for name in ("switch", "enter", "leave_backward"):
            with pytest.raises(IndexError):
                getattr(one, name)(lane)
        with pytest.raises(IndexError):
            one.shift(1, 0, lane)
    with pytest.raises(TypeError):
        one.switch("x")
    with pytest.raises(ValueError, match="one number for each lane"):
        one.spent = [1, 2]
    assert (one.spent, one.current, one.backwards) == ([0] * 12, HOST, 0)
    assert one.last == last


@each_kind
def test_subclasses_and_their_memory(kind):
    class Lanes(kind):
        __slots__ = ("more",)

        def __init__(self):
            super().__init__()
            self.more = self  # a circle

    gc.collect()
    for _ in range(100):
        one = Lanes()
        one.switch(1)
    del one
    gc.collect()
    assert not any(type(left) is Lanes for left in gc.get_objects())


def test_a_clock_that_was_never_begun_does_no_harm():
    for kind in KINDS:
        one = kind.__new__(kind)
        with suppress(AttributeError):
            one.switch(0)
            one.lap(False)
            assert one.steps == 1


def test_without_the_extension_the_fallback_serves():
    code = "from flatout.kernels import clock; print(clock.available(), clock.Clock.__module__)"
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env={"FLATOUT_KERNELS": "numpy", "PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout.split() == ["False", "flatout.kernels.clock_fallback"]
