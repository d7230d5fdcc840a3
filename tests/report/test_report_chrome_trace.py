"""The trace against the rules of the Trace Event Format, and against what was put in."""

import json

import pytest
from report_verdicts import LANES, observation

from flatout.measure.timeline import Timeline
from flatout.observe import Observation
from flatout.report.chrome_trace import trace, trace_timelines

METADATA = {"process_name": "name", "process_labels": "labels", "thread_name": "name"}
METADATA["process_sort_index"] = "sort_index"


def checked(found):
    """The events as a viewer reads them: each by the rules for its phase."""
    file = json.loads(json.dumps(found, allow_nan=False))
    assert file["displayTimeUnit"] in ("ms", "ns")
    for event in file["traceEvents"]:
        assert {"ph", "name", "pid", "tid"} <= event.keys()
        assert isinstance(event["name"], str)
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert event["ph"] in ("X", "C", "M")
        if event["ph"] == "M":
            assert list(event["args"]) == [METADATA[event["name"]]]
            continue
        assert isinstance(event["ts"], float)
        assert event["ts"] >= 0
        if event["ph"] == "X":
            assert event["dur"] >= 0
        else:
            assert event["args"]
            assert all(isinstance(value, int | float) for value in event["args"].values())
    nested(file["traceEvents"])
    return file["traceEvents"]


def nested(events):
    """Slices of one track lie within each other or beside each other, to the nanosecond."""
    tracks = {}
    for event in events:
        if event["ph"] == "X":
            begin, length = round(event["ts"] * 1e3), round(event["dur"] * 1e3)
            tracks.setdefault((event["pid"], event["tid"]), []).append((begin, -length))
    for slices in tracks.values():
        above = []
        for begin, minus in sorted(slices):
            while above and above[-1] <= begin:
                above.pop()
            assert not above or begin - minus <= above[-1]
            above.append(begin - minus)


def of(events, **wanted):
    return [one for one in events if all(one.get(name) == is_ for name, is_ in wanted.items())]


def test_each_step_has_its_own_length_and_the_lanes_their_mean_shares():
    lanes = {"input": 30.0, "forward": 50.0, "backward": None, "evaluation": 9.0}
    one = observation(
        rank=3, steps=3, step_ms=[100.0, 50.0, 150.0], lanes_ms=lanes, memory_at=[0, 2]
    )
    events = checked(trace([one]))
    assert {event["pid"] for event in events} == {3}
    assert [(step["ts"], step["dur"]) for step in of(events, cat="step")] == [
        (0.0, 100e3),
        (100e3, 50e3),
        (150e3, 150e3),
    ]
    # A fifth of each step was not seen, and is not given to those lanes that were.
    assert [slice_["dur"] for slice_ in of(events, name="input")] == [30e3, 15e3, 45e3]
    assert [slice_["ts"] for slice_ in of(events, name="forward")] == [30e3, 115e3, 195e3]
    assert not of(events, name="backward")
    (evaluation,) = of(events, name="evaluation")
    assert (evaluation["ts"], evaluation["dur"]) == (300e3, 27e3)
    assert [(one["ts"], one["args"]) for one in of(events, ph="C")] == [
        (0.0, {"MB": 500.0}),
        (150e3, {"MB": 510.0}),
    ]


def test_ranks_are_processes_in_their_order():
    events = checked(trace([Observation.of(observation(rank)) for rank in (1, 0)]))
    names = {event["pid"]: event["args"]["name"] for event in of(events, name="process_name")}
    assert names == {0: "rank 0", 1: "rank 1"}
    assert of(events, name="process_sort_index", pid=1)[0]["args"] == {"sort_index": 1}
    assert len(of(events, cat="step", pid=0)) == len(of(events, cat="step", pid=1)) == 100


def test_without_lengths_of_steps_the_means_are_drawn():
    events = checked(trace([observation(step_ms=[], steps=4, lanes_ms={"input": 2.0, "gc": 1.0})]))
    assert [step["dur"] for step in of(events, cat="step")] == [3e3] * 4
    assert checked(trace([observation(step_ms=[], steps=4, lanes_ms={})]))
    assert checked(trace([])) == []


def test_lanes_longer_than_the_steps_are_brought_into_them():
    events = checked(
        trace([observation(step_ms=[10.0] * 5, lanes_ms={"input": 15.0, "sync": 5.0})])
    )
    assert {one["dur"] for one in of(events, name="input")} == {7.5e3}


def test_only_the_latest_of_many_steps_are_drawn():
    one = observation(steps=90, step_ms=[float(at + 1) for at in range(60)], memory_at=[10, 85])
    found = trace([one], most_steps=10)
    events = checked(found)
    assert [step["name"] for step in of(events, cat="step")] == [
        f"step {at}" for at in range(80, 90)
    ]
    assert of(events, cat="step")[0]["dur"] == 51e3
    assert [one["args"]["MB"] for one in of(events, ph="C")] == [510.0]
    assert found["otherData"]["most_steps"] == 10


def test_the_file_says_what_is_measured_and_what_is_a_mean():
    said = trace([observation(lanes_ms=LANES)])["otherData"]
    assert "means over all steps" in said["notes"]
    assert said["command"] == "train.py --epochs 5"
    assert "recorded in each step" in trace_timelines({})["otherData"]["notes"]


@pytest.mark.parametrize("most_steps", [2, 5_000])
def test_a_timeline_is_drawn_as_it_was(most_steps):
    one, two = Timeline(capacity=4), Timeline()
    for at in range(6):
        one.record(1_000_000 + 10_000 * at, 1_000, 0, 2_000, 3_000, 0, 1_500 + at, 0)
    two.record(1_005_000, 4_000, 1, 1, 1, 1, 1, 1)
    events = checked(trace_timelines({0: one, 1: two}, most_steps=most_steps))
    kept = min(most_steps, 4)
    steps = of(events, cat="step", pid=0)
    assert [step["name"] for step in steps] == [f"step {at}" for at in range(6 - kept, 6)]
    zero = min(1_000_000 + 10_000 * (6 - kept), 1_005_000)
    assert steps[0]["ts"] == (1_000_000 + 10_000 * (6 - kept) - zero) / 1e3
    assert steps[-1]["dur"] == 7.505
    last = [one for one in of(events, cat="lane", pid=0) if one["args"] == {"step": 5}]
    assert [(lane["name"], lane["dur"]) for lane in last] == [
        ("input", 1.0),
        ("forward", 2.0),
        ("backward", 3.0),
        ("optimizer", 1.505),
    ]
    assert [lane["ts"] - steps[-1]["ts"] for lane in last] == pytest.approx([0, 1, 3, 6])
    assert of(events, cat="step", pid=1)[0]["dur"] == 4.006
