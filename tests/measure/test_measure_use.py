"""What a process uses over time: what is counted, and that it stays a few hundred points."""

import os
import subprocess
import sys
import time
from itertools import pairwise

import pytest

from flatout.measure import Use
from flatout.measure.use import COLUMNS, thinned


def test_cpus_memory_and_workers_are_seen():
    use = Use(lambda: (0.5, 7 << 20))
    child = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        deadline = time.monotonic() + 100
        before = os.times()
        while (spent := child_seconds(child.pid)) < 0.2 and time.monotonic() < deadline:
            time.sleep(0.02)
        use.look()
        found = use.as_dict()
        own = os.times().user + os.times().system - before.user - before.system
    finally:
        child.kill()
        child.wait()
    assert set(found) == set(COLUMNS)
    used = found["cpus"][0] * found["seconds"][0]
    assert used >= 0.9 * (spent + own) - 0.02  # ticks of a hundredth of a second
    assert found["memory_bytes"][0] > 1 << 20
    assert (found["gpu"], found["gpu_memory_bytes"]) == ([0.5], [7_340_000])
    assert 0 <= found["machine"][0] <= 1


def child_seconds(pid):
    import psutil

    times = psutil.Process(pid).cpu_times()
    return times.user + times.system


@pytest.mark.slow
def test_a_run_of_days_stays_at_some_hundred_points(fake_clock):
    use = Use()
    for _ in range(5000):
        fake_clock.now = max(fake_clock.now, use.due)
        use.look()
    points = use.as_dict()["seconds"]
    assert 128 <= len(points) <= 256
    assert points == sorted(points)
    whole = points[-1]
    assert whole > 86_400
    assert max(b - a for a, b in pairwise(points)) < whole / 64


def test_who_looks_often_makes_no_more_points(fake_clock):
    use = Use()
    for _ in range(1000):
        fake_clock.sleep(0.1)
        use.look()
    assert len(use.as_dict()["seconds"]) <= 1 + 100 / 0.5


def test_two_points_become_one_over_the_time_of_both():
    points = [
        (1.0, 2.0, None, 5, 0.0, None),
        (4.0, 1.0, 0.5, 9, None, 3),
        (5.0, 7.0, 0.1, 1, 1.0, 1),
    ]
    first, last = thinned(points)
    assert first == (4.0, pytest.approx((2.0 * 1 + 1.0 * 3) / 4), 0.5, 9, 0.0, 3)
    assert last == points[2]


def test_what_is_never_known_has_no_column(fake_clock):
    use = Use(lambda: (None, None))
    fake_clock.sleep(3)
    use.look()
    assert "gpu" not in use.as_dict()
    assert Use().as_dict() == {}
