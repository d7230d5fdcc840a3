import gc
import json
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flatout.errors import FlatoutError
from flatout.measure.timeline import LANES, STEP_LANES, Timeline


def test_lanes_are_the_ones_of_the_design():
    assert LANES == (
        "input",
        "copy",
        "forward",
        "backward",
        "sync",
        "optimizer",
        "host",
        "evaluation",
        "saving",
        "gc",
        "idle",
    )


def test_two_steps_split_into_lanes_and_idle():
    timeline = Timeline()
    timeline.record(1_000_000, 1, 2, 3, 4, 5, 6, 7)
    timeline.record(1_000_128, 1, 2, 3, 4, 5, 6, 7)
    lanes = timeline.lanes()
    for ns, lane in enumerate(STEP_LANES, start=1):
        assert lanes[lane] == pytest.approx(ns / 1e6)
    assert lanes["idle"] == pytest.approx(100 / 2 / 1e6)
    assert timeline.steps == 2
    np.testing.assert_allclose(timeline.step_times(), [28e-9, 28e-9])
    assert timeline.step_times().dtype == np.float64


def test_what_was_added_between_two_steps_is_not_idle():
    timeline = Timeline()
    timeline.record(0, 10, 0, 0, 0, 0, 0, 0)
    timeline.add("evaluation", 60)
    timeline.add("saving", 30)
    timeline.record(110, 10, 0, 0, 0, 0, 0, 0)
    lanes = timeline.lanes()
    assert lanes["evaluation"] * 2e6 == pytest.approx(60)
    assert lanes["saving"] * 2e6 == pytest.approx(30)
    assert lanes["idle"] * 2e6 == pytest.approx(10)


@pytest.mark.parametrize("lane", ["gc", "idle", "lunch"])
def test_a_lane_that_cannot_be_added_to_is_named(lane):
    with pytest.raises(FlatoutError, match=lane):
        Timeline().add(lane, 1)


def test_without_a_step_everything_is_empty():
    timeline = Timeline()
    assert timeline.lanes() == dict.fromkeys(LANES, 0.0)
    assert timeline.critical_lane() is None
    assert timeline.percentiles() == {}
    assert timeline.step_times().shape == (0,)
    assert timeline.as_dict()["steps"] == 0
    json.dumps(timeline.as_dict(), allow_nan=False)


durations = st.tuples(*[st.integers(0, 10**9)] * 7)
moves = st.one_of(
    st.tuples(st.just("step"), durations),
    st.tuples(st.just("add"), st.sampled_from(["evaluation", "saving", "host"])),
    st.tuples(st.just("read"), st.none()),
)


@settings(deadline=None)
@given(st.lists(st.tuples(moves, st.integers(0, 10**6)), max_size=60), st.integers(1, 5))
def test_lanes_account_for_all_the_time_however_it_is_read(script, capacity):
    timeline = Timeline(capacity)
    now, first, last_end, outside_before, pending, steps = 10**12, None, 0, 0, 0, []
    for (kind, what), wait in script:
        now += wait
        if kind == "step":
            first = now if first is None else first
            timeline.record(now, *what)
            now += sum(what)
            last_end, pending = now, 0
            steps.append(sum(what))
        elif kind == "add":
            timeline.add(what, wait)
            pending += wait
            if first is None:
                outside_before += wait
        else:
            timeline.lanes()
    if not steps:
        assert timeline.lanes()["idle"] == 0
        return
    # What lies before the first step and after the last is in its lane but not in the span.
    outside = outside_before + pending
    total_ns = sum(timeline.lanes().values()) * len(steps) * 1e6
    assert total_ns == pytest.approx(last_end - first + outside, rel=1e-9, abs=1)
    assert timeline.steps == len(steps)
    kept = steps[-timeline.step_times().size :]
    np.testing.assert_allclose(timeline.step_times(), np.array(kept) / 1e9)
    assert len(kept) == min(len(steps), capacity)


def test_detail_is_bounded_and_totals_are_not():
    timeline = Timeline(capacity=1500)
    assert timeline.capacity == 2048
    for index in range(5000):
        timeline.record(index * 100, index, 0, 0, 0, 0, 0, 0)
    assert timeline.steps == 5000
    assert timeline.lanes()["input"] * 1e6 == pytest.approx(np.arange(5000).mean())
    np.testing.assert_allclose(timeline.step_times(), np.arange(5000 - 2048, 5000) / 1e9)


def test_percentiles_and_critical_lane():
    timeline = Timeline()
    for ms in range(1, 102):
        timeline.record(ms * 10**9, 0, 0, ms * 10**6, 0, 0, 0, 0)
    assert timeline.percentiles() == pytest.approx({50: 0.051, 90: 0.091, 99: 0.1})
    assert timeline.percentiles((0, 100)) == pytest.approx({0: 0.001, 100: 0.101})
    timeline = Timeline()
    timeline.record(0, 1, 1, 5, 9, 1, 1, 1)
    assert timeline.critical_lane() == "backward"
    timeline.record(1000, 1, 1, 5, 9, 1, 1, 1)
    assert timeline.critical_lane() == "idle"


def test_reset_forgets_everything():
    timeline = Timeline(capacity=2)
    for index in range(5):
        timeline.record(index * 10, 1, 1, 1, 1, 1, 1, 1)
    timeline.add("saving", 50)
    timeline.reset()
    assert timeline.steps == 0
    assert timeline.lanes() == dict.fromkeys(LANES, 0.0)
    timeline.record(0, 1, 0, 0, 0, 0, 0, 0)
    assert timeline.lanes()["input"] * 1e6 == pytest.approx(1)
    assert timeline.lanes()["idle"] == 0


def test_as_dict_is_json():
    timeline = Timeline()
    timeline.record(0, 2_000_000, 0, 0, 0, 0, 0, 0)
    plain = json.loads(json.dumps(timeline.as_dict(), allow_nan=False))
    assert plain["steps"] == 1
    assert plain["critical_lane"] == "input"
    assert plain["lanes_ms"]["input"] == pytest.approx(2.0)
    assert plain["step_ms"] == pytest.approx({"p50": 2.0, "p90": 2.0, "p99": 2.0})
    assert plain["added_us_per_step"] > 0


def test_added_time_is_counted_and_grows_with_the_clock_reads():
    few, many = Timeline(clock_reads=0), Timeline(clock_reads=1000)
    assert 0 < few.added_us_per_step < many.added_us_per_step
    assert few.steps == 0


def test_capacity_must_hold_a_step():
    with pytest.raises(FlatoutError, match="capacity"):
        Timeline(capacity=0)


@pytest.fixture
def collected_by_hand():
    """No automatic collection, so that a test's own are the only ones, and these are short."""
    gc.disable()
    gc.freeze()
    yield
    gc.unfreeze()
    gc.enable()


@pytest.mark.parametrize("lane", STEP_LANES)
def test_collections_move_out_of_the_lane_they_interrupt(collected_by_hand, fake_clock, lane):
    timeline = Timeline()
    recorded = dict.fromkeys(STEP_LANES, 0)
    timeline.start()
    for _ in range(3):
        # Each lane ends where the next begins, as in a loop that reads the clock once between.
        reads = [fake_clock()]
        for name in STEP_LANES:
            if name == lane:
                gc.collect()
            reads.append(fake_clock())
        took = dict(zip(STEP_LANES, np.diff(reads).tolist(), strict=True))
        timeline.record(reads[0], **took)
        for name in STEP_LANES:
            recorded[name] += took[name]
    timeline.stop()
    total_ns = {name: ms * 3e6 for name, ms in timeline.lanes().items()}
    assert total_ns["gc"] > 0
    recorded[lane] -= total_ns["gc"]
    assert recorded == pytest.approx({name: total_ns[name] for name in STEP_LANES})


def test_collections_between_steps_leave_idle_or_the_added_lane(collected_by_hand, fake_clock):
    timeline = Timeline()
    timeline.start()
    first = fake_clock()
    timeline.record(first, 0, 0, 0, 0, 0, 0, 0)
    gc.collect()
    second = fake_clock()
    timeline.record(second, 0, 0, 0, 0, 0, 0, 0)
    lanes = timeline.lanes()
    collected_in_idle = lanes["gc"] * 2e6
    assert collected_in_idle > 0
    assert lanes["idle"] * 2e6 == pytest.approx(second - first - collected_in_idle)

    began = fake_clock()
    gc.collect()
    evaluated = fake_clock() - began
    timeline.add("evaluation", evaluated)
    timeline.record(fake_clock(), 0, 0, 0, 0, 0, 0, 0)
    timeline.stop()
    lanes = timeline.lanes()
    collected_in_evaluation = lanes["gc"] * 3e6 - collected_in_idle
    assert collected_in_evaluation > 0
    assert lanes["evaluation"] * 3e6 == pytest.approx(evaluated - collected_in_evaluation)


def test_collections_count_only_between_start_and_stop(collected_by_hand, fake_clock):
    timeline = Timeline()
    start = fake_clock()
    gc.collect()
    timeline.record(start, fake_clock() - start, 0, 0, 0, 0, 0, 0)
    timeline.start()
    timeline.stop()
    start = fake_clock()
    gc.collect()
    timeline.record(start, fake_clock() - start, 0, 0, 0, 0, 0, 0)
    assert timeline.lanes()["gc"] == 0


def test_the_pause_between_stop_and_start_is_not_idle(collected_by_hand, fake_clock):
    timeline = Timeline()
    timeline.start()
    first = fake_clock()
    timeline.record(first, 0, 0, 0, 0, 0, 0, 0)
    timeline.stop()
    fake_clock.sleep(0.05)
    timeline.start()
    second = fake_clock()
    timeline.record(second, 0, 0, 0, 0, 0, 0, 0)
    timeline.stop()
    assert timeline.lanes()["idle"] * 2e6 <= second - first - 50e6


def test_a_dropped_timeline_leaves_no_callback():
    before = list(gc.callbacks)
    timeline = Timeline()
    timeline.start()
    assert len(gc.callbacks) == len(before) + 1
    del timeline
    gc.collect()
    assert gc.callbacks == before


def test_another_thread_may_read_while_one_records():
    timeline = Timeline(capacity=16)
    done = threading.Event()
    wrong = []

    def read():
        while not done.is_set():
            lanes = timeline.lanes()
            if timeline.steps and not np.isclose(lanes["input"] * 1e6, 7, atol=1e-6):
                wrong.append(lanes["input"])
            timeline.step_times()

    reader = threading.Thread(target=read)
    timeline.record(0, 7, 0, 0, 0, 0, 0, 0)
    reader.start()
    for index in range(1, 20_000):
        timeline.record(index * 10, 7, 0, 0, 0, 0, 0, 0)
    done.set()
    reader.join()
    assert not wrong
    assert timeline.lanes()["input"] * 1e6 == pytest.approx(7)
    assert timeline.lanes()["idle"] * 1e6 == pytest.approx(3, rel=1e-3)
