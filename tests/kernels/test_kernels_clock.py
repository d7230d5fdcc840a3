"""The clock of lanes: all time goes to one of them."""

import gc
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flatout.kernels.clock import AFTER, FORWARD, HOST, INPUT, KEPT, SAVING, Clock

OPERATIONS = st.one_of(
    st.tuples(st.sampled_from(["switch", "enter", "leave_backward"]), st.integers(0, 11)),
    st.tuples(st.just("shift"), st.integers(0, 99), st.integers(0, 11), st.integers(0, 11)),
    st.tuples(st.just("lap"), st.booleans()),
    st.tuples(st.sampled_from(["enter_model", "ask", "take", "mark", "unmark", "leave_step"])),
)
LEADS_TO = {"ask": INPUT, "take": FORWARD, "leave_step": HOST}


@given(st.lists(OPERATIONS))
def test_no_time_is_lost_or_counted_twice(operations):
    before = time.perf_counter_ns()
    one = Clock()
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


def test_time_goes_to_the_lane_that_ran():
    one = Clock()
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


def test_steps_and_what_lies_between_them():
    one = Clock()
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


def test_between_two_backward_passes_is_the_hosts_time():
    one = Clock()
    one.spent = [0] * 12
    for passes, after, host in ((1, 40, 0), (2, 40, 60), (1, 50, 60)):
        one.backwards = passes
        one.shift({1: after - one.spent[AFTER], 2: 60}[passes], FORWARD, AFTER)
        one.lap(False)
        assert (one.spent[AFTER], one.spent[HOST]) == (after, host)
        assert one.backwards == 0


def test_the_latest_steps_are_kept():
    one = Clock()
    for step in range(2 * KEPT + 5):
        one.last = one.began + step
        one.lap(False)
        if step == KEPT - 1:
            assert one.step_ns() == list(range(KEPT))
    assert one.step_ns() == list(range(KEPT + 5, 2 * KEPT + 5))


def test_a_batch_is_asked_for_and_taken():
    one = Clock()
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


def test_a_step_that_is_due_says_so():
    one = Clock()
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


def test_only_the_outermost_model_is_entered():
    one = Clock()
    assert one.enter_model() == HOST
    assert one.is_inside
    assert one.enter_model() == -1
    one.is_inside = False
    one.current = INPUT
    assert one.enter_model() == -1
    assert not one.is_inside
    one.current, one.thread = FORWARD, 0
    assert one.enter_model() == -1


def test_another_thread_changes_nothing():
    def calls(one):
        return [one.enter(1), one.enter_model(), one.ask(), one.leave_step()]

    one = Clock()
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


def test_it_starts_over():
    one = Clock()
    one.switch(1)
    one.lap(False)
    one.enter_model()
    one.__init__()
    assert (one.spent, one.first) == ([0] * 12, [0] * 12)
    assert (one.current, one.steps, one.step_ns()) == (HOST, 0, [])
    assert not one.is_inside


def test_a_lane_that_is_none_is_an_error_and_costs_nothing():
    one = Clock()
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


@pytest.mark.slow
def test_subclasses_and_their_memory():
    class Lanes(Clock):
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
    one = Clock.__new__(Clock)
    one.switch(0)
    one.lap(False)
    assert one.steps == 1
