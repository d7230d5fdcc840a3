import json
import os
import subprocess
import sys
import threading

import pytest

from flatout.devices.threads import affinity, reset_affinity, set_affinity
from flatout.errors import DeviceError


def run(code: str) -> list:
    done = subprocess.run(
        [sys.executable, "-c", f"import json\n{code}"], capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout)


@pytest.fixture
def restored():
    before = affinity()
    yield sorted(before)
    set_affinity(before)


def test_all_threads_are_bound_and_the_first_cpus_come_back(restored) -> None:
    stop = threading.Event()
    other = threading.Thread(target=stop.wait)
    other.start()
    try:
        one = {restored[-1]}
        assert set_affinity(one) == set(restored)
        assert affinity() == one
        assert os.sched_getaffinity(other.native_id) == one
        assert set_affinity(restored) == one
        set_affinity(one)
        reset_affinity()
        assert affinity() == set(restored)
        assert os.sched_getaffinity(other.native_id) == set(restored)
    finally:
        stop.set()
        other.join()


@pytest.mark.parametrize("wrong", [[], [4000], [10**12], [-1]])
def test_cpus_that_are_not_there_are_refused_and_nothing_changes(restored, wrong) -> None:
    with pytest.raises(DeviceError, match="cannot be bound") as caught:
        set_affinity(wrong)
    assert caught.value.where == "process.affinity"
    assert affinity() == set(restored)


def test_cpus_of_which_some_are_not_there_are_refused_too(restored) -> None:
    with pytest.raises(DeviceError, match="CPU 1000"):
        set_affinity([restored[0], 1000])
    assert affinity() == set(restored)


@pytest.mark.slow
def test_the_number_of_threads_is_set_and_told_and_denormals_flushed_before_the_first_operator():
    assert run("""
import torch
from flatout.devices.threads import flush_denormals, set_interop_threads, set_threads
default = torch.get_num_threads()
before = set_threads(2)
again = set_threads(2)
interop = set_interop_threads(3), torch.get_num_interop_threads(), set_interop_threads(3)
everywhere = flush_denormals(True)
tiny = torch.full((300_000,), 1e-40)
zeros = int((tiny.mul(1.0).view(torch.int32) == 0).sum())
print(json.dumps([before == default, again, interop, everywhere, zeros]))
""") == [True, 2, [True, 3, True], True, 300_000]


@pytest.mark.slow
def test_too_late_for_threads_that_run_already() -> None:
    assert run("""
import torch
from flatout.devices.threads import flush_denormals, set_interop_threads, set_threads
set_threads(2)
kept = flush_denormals(False)
set_interop_threads(3)
print(json.dumps([kept, flush_denormals(True), set_interop_threads(7)]))
""") == [True, False, False]
