"""What a GPU did in a step, from what torch's profiler has noted."""

from flatout.observe.device_time import Ran, device_time

MS = 1_000_000
HTOD, DTOH = "Memcpy HtoD (Pageable -> Device)", "Memcpy DtoH (Device -> Pageable)"


def ran(name, began_ms, ended_ms, queued_ms):
    return Ran(name, began_ms * MS, ended_ms * MS, queued_ms * MS)


def test_what_ran_belongs_to_the_lane_in_which_it_was_queued():
    marks = [(0, "forward"), (2 * MS, "backward"), (4 * MS, "forward"), (5 * MS, "optimizer")]
    found = device_time(
        [
            ran(HTOD, 0, 1, 0),
            ran("gemm", 1, 21, 1),
            ran("gemm", 21, 61, 3),
            ran("adam", 61, 65, 5),
            ran(DTOH, 65, 66, 6),
        ],
        marks,
        steps=2,
    )
    assert found.lanes_ms == {"forward": 10.0, "backward": 20.0, "optimizer": 2.0}
    assert (found.busy_ms, found.launches) == (33.0, 2.5)
    assert (found.to_device_ms, found.to_host_ms, found.is_pageable) == (0.5, 0.5, True)
    assert found.kernels == [("gemm", 30.0), ("adam", 2.0)]


def test_what_runs_at_the_same_time_counts_once():
    found = device_time([ran("a", 0, 10, 0), ran("b", 4, 6, 1), ran("c", 8, 14, 2)], [], steps=1)
    assert found.busy_ms == 14.0
    assert found.lanes_ms["forward"] == 18.0


def test_copies_from_pinned_memory_are_told_apart():
    found = device_time([ran("Memcpy HtoD (Pinned -> Device)", 0, 2, 0)], [], steps=1)
    assert (found.to_device_ms, found.is_pageable) == (2.0, False)
