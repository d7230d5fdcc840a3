"""Lanes of a device that runs behind the host, on one whose times are known."""

import numpy as np
import pytest

from flatout.measure import DeviceLanes, Timeline

MS = 1_000_000


class Device:
    """Runs what is queued, one after the other; times are in ms."""

    def __init__(self):
        self.now = self.free_at = 100.0
        self.waits = 0

    def host(self, ms):
        self.now += ms

    def queue(self, ms):
        self.free_at = max(self.free_at, self.now) + ms

    def event(self):
        return Event(self)


class Event:
    def __init__(self, device):
        self.device, self.at = device, None

    def record(self, stream=None):
        self.at = max(self.device.now, self.device.free_at)

    def query(self):
        return self.device.now >= self.at

    def synchronize(self):
        self.device.waits += 1
        self.device.now = max(self.device.now, self.at)

    def elapsed_time(self, end_event):
        return end_event.at - self.at


@pytest.fixture
def device():
    return Device()


@pytest.fixture
def timeline():
    return Timeline()


@pytest.fixture
def lanes(device, timeline):
    return DeviceLanes(timeline, device.event, lambda: "stream")


def step(device, lanes, *, input=1.0, queueing=1.0, computes=3.0, host=0.5, samples=32):
    """A step whose forward takes a third of what the device computes; returns what it waited."""
    start = device.now
    device.host(input)
    lanes.begin()
    for lane, share in (("forward", 1 / 3), ("backward", 0.5), ("optimizer", 1 / 6)):
        device.host(queueing / 3)
        device.queue(computes * share)
        lanes.mark(lane)
    device.host(host)
    lanes.record(
        round(start * MS), round(input * MS), 0, 0, 0, round(queueing * MS), round(host * MS),
        samples,
    )  # fmt: skip


def test_of_a_busy_device_lanes_are_its_own_and_nothing_waits(device, timeline, lanes):
    for _ in range(50):
        step(device, lanes, computes=30.0)
    assert device.waits == 0
    assert timeline.steps < 50
    assert timeline.behind == (50 - timeline.steps, 32 * (50 - timeline.steps))
    timeline.settle()
    assert (timeline.steps, timeline.samples, timeline.behind) == (50, 1600, (0, 0))
    own = timeline.rows()[5:-1, 1:] / MS
    # input, copy, forward, backward, sync, optimizer, host
    assert np.allclose(own, [0, 0, 10, 15, 0, 5, 0], atol=1e-3)
    assert np.allclose(timeline.step_times()[5:-1], 0.03)


def test_of_a_device_that_waits_the_host_says_for_what(device, timeline, lanes):
    for _ in range(50):
        step(device, lanes, input=8.0, computes=3.0)
    timeline.settle()
    assert timeline.step_times()[1:-1].sum() == pytest.approx(48 * 9.5e-3, rel=0.01)
    input_ms, host_ms = timeline.rows()[1:-1, [1, 7]].mean(axis=0) / MS
    # What the device computes while the host is between steps is no waiting.
    assert 5.5 < input_ms < 8.0
    assert input_ms / host_ms == pytest.approx(16, rel=0.01)


@pytest.mark.parametrize("computes", [0.5, 30.0])
def test_what_lies_between_steps_stays_between_them(device, timeline, lanes, computes):
    began = device.now
    for number in range(20):
        step(device, lanes, computes=computes)
        if number == 9:
            device.queue(40.0)
            device.host(1.0)
            timeline.settle()
            before = device.now
            device.host(100.0)
            timeline.add("evaluation", round((device.now - before) * MS))
    timeline.settle()
    device.now = max(device.now, device.free_at)
    found = timeline.lanes()
    assert found["evaluation"] * 20 == pytest.approx(100.0)
    assert sum(found.values()) * 20 == pytest.approx(device.now - began, rel=0.02)
    assert timeline.rows()[:, 1:].min() >= 0
    rows = timeline.rows()
    assert (rows[1:, 0] >= rows[:-1].sum(axis=1) - 2).all()


def test_a_part_may_come_several_times_and_a_step_in_one_piece(device, timeline, lanes):
    lanes.begin()
    for lane in ("forward", "backward", "forward", "backward", "sync", "optimizer"):
        device.queue(2.0)
        lanes.mark(lane)
    lanes.record(round(device.now * MS), 0, 0, 0, 0, 0, 0, 8)
    lanes.begin()
    device.queue(7.0)
    lanes.record(round(device.now * MS), 0, 0, 0, 0, 0, 0, 8)
    timeline.settle()
    assert (timeline.rows()[:, 1:] / MS).tolist() == [[0, 0, 4, 4, 2, 2, 0], [0, 0, 7, 0, 0, 0, 0]]


def test_a_device_that_has_failed_ends_nothing(device, timeline, lanes):
    step(device, lanes)
    step(device, lanes, computes=50.0)

    def fails():
        raise RuntimeError("CUDA error: device-side assert triggered")

    device_event = lanes._queued[-1].last
    device_event.query = device_event.synchronize = fails
    timeline.settle()
    assert timeline.behind == (0, 0)
    timeline.reset()
    assert timeline.steps == 0
