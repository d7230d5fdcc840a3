"""The clock of lanes: in C and in Python, which must do the same."""

import gc
import subprocess
import sys
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flatout.kernels import clock, clock_twin

KINDS = [clock_twin.Clock]
if clock.available():
    KINDS.append(clock.Clock)
each_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__module__)


@each_kind
@given(st.lists(st.tuples(st.sampled_from(["switch", "enter"]), st.integers(0, 4))))
def test_no_time_is_lost_or_counted_twice(kind, calls):
    before = time.perf_counter_ns()
    one = kind(5, 2)
    first, current = one.last, 2
    assert before <= first <= time.perf_counter_ns()
    for name, lane in calls:
        assert getattr(one, name)(lane) == current
        current = lane
        assert one.current == lane
        assert sum(one.spent) == one.last - first
    assert one.last <= time.perf_counter_ns()


@each_kind
def test_time_goes_to_the_lane_that_ran(kind):
    one = kind(3, 0)
    time.sleep(0.02)
    assert one.switch(1) == 0
    time.sleep(0.04)
    assert one.enter(2) == 1
    spent = [ns / 1e9 for ns in one.spent]
    assert spent[0] >= 0.02
    assert spent[1] >= 0.04
    assert spent[2] == 0
    one.last -= 5_000_000_000  # as of somebody who leaves time out
    one.switch(0)
    assert one.spent[2] >= 5_000_000_000


@each_kind
def test_another_thread_changes_nothing(kind):
    one = kind(2, 0)
    said = []
    thread = threading.Thread(target=lambda: said.append(one.enter(1)))
    thread.start()
    thread.join()
    assert said == [-1]
    assert (one.current, one.spent) == (0, [0, 0])
    assert one.thread == threading.get_ident()
    one.thread = 0
    assert one.enter(1) == -1
    assert one.switch(1) == 0


@each_kind
def test_it_begins_anew_with_the_same_list(kind):
    one = kind(3, 0)
    spent = one.spent
    one.switch(1)
    one.__init__(4, 3)
    assert one.spent is spent
    assert spent == [0, 0, 0, 0]
    assert one.current == 3


@each_kind
def test_a_lane_that_is_none_is_an_error_and_costs_nothing(kind):
    with pytest.raises(IndexError, match="no such lane"):
        kind(2, 2)
    one = kind(2, 1)
    last = one.last
    for name in ("switch", "enter"):
        for lane in (-1, 2):
            with pytest.raises(IndexError):
                getattr(one, name)(lane)
    with pytest.raises(TypeError):
        one.switch("x")
    assert (one.spent, one.current) == ([0, 0], 1)
    assert one.last == last


@each_kind
def test_subclasses_and_their_memory(kind):
    class Lanes(kind):
        __slots__ = ("more",)

        def __init__(self):
            super().__init__(2, 0)
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
        with pytest.raises((IndexError, AttributeError)):
            one.switch(0)


def test_without_the_extension_the_twin_serves():
    code = "from flatout.kernels import clock; print(clock.available(), clock.Clock.__module__)"
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env={"FLATOUT_KERNELS": "numpy", "PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout.split() == ["False", "flatout.kernels.clock_twin"]
