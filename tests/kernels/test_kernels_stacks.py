"""A thread's lines are seen from beside it, without its help and without bias."""

import gc
import os
import sys
import threading
import time
from collections import Counter
from functools import partial

import pytest

from flatout.kernels import Clock, stacks_of
from flatout.observe.stacks import codes

if stacks_of(Clock()) is None:
    pytest.skip("the frames of this Python cannot be read", allow_module_level=True)


def in_python(ms):
    until = time.thread_time() + ms / 1e3
    while time.thread_time() < until:
        pass


def in_c(ms):
    until = time.thread_time() + ms / 1e3
    while time.thread_time() < until:
        sum(range(20_000))


def work_until(stacks, least, *works):
    """Works, each for so many ms in turn, until it was looked at so often.

    Looks are as rare as they are dear, and on a busy machine they are dear.
    """
    until = time.monotonic() + 120
    while sum(node[3] for node in stacks.seen()) < least and time.monotonic() < until:
        for work, ms in works:
            work(ms)


def watched(*works, least=60):
    """The share of time that was seen beneath each of these functions."""
    stacks = stacks_of(Clock())
    stacks.start()
    work_until(stacks, least, *works)
    stacks.stop()
    nodes, known = stacks.seen(), codes()
    found = Counter()
    for at, (*_, ns, _) in enumerate(nodes):
        names = []
        while at >= 0:
            at, code = nodes[at][:2]
            names.append(known[code].co_name if code in known else "")
        found[next((name for name in names if name.startswith("in_")), "")] += sum(ns)
    return found


@pytest.mark.slow
def test_python_and_c_are_seen_for_as_long_as_they_run():
    seen = watched((in_python, 6), (in_c, 2))
    # A thread of Python's own would see one of the two alone.
    assert seen["in_python"] > seen["in_c"] > 0


@pytest.mark.slow
def test_stacks_lead_from_the_outermost_frame_to_the_instruction_that_runs():
    stacks = stacks_of(Clock())
    stacks.start()
    work_until(stacks, 20, (in_python, 20))
    stacks.stop()
    nodes, known = stacks.seen(), codes([sys._getframe(at).f_code for at in range(4)])
    most = max(range(len(nodes)), key=lambda at: nodes[at][3])
    names = []
    while most >= 0:
        most, code, instruction = nodes[most][:3]
        if (code := known.get(code)) is None:
            continue
        names.append(code.co_name)
        lines = [line for start, end, line in code.co_lines() if start <= instruction < end]
        assert len(lines) == 1
    this = "test_stacks_lead_from_the_outermost_frame_to_the_instruction_that_runs"
    assert names[:3] == ["in_python", "work_until", this]
    assert len(names) > 10


def test_time_goes_to_the_lane_and_the_steps_in_which_it_was_spent():
    clock = Clock()
    stacks = stacks_of(clock)
    clock.switch(2)
    stacks.start()
    work_until(stacks, 8, (in_python, 20))
    clock.switch(3)
    work_until(stacks, 16, (in_python, 20))
    clock.steps = 40
    work_until(stacks, 24, (in_python, 20))
    stacks.stop()
    nodes = stacks.seen()
    lanes = [sum(column) for column in zip(*(node[4] for node in nodes), strict=True)]
    assert lanes[2] > 0
    assert lanes[3] > 0
    assert sum(lanes) == lanes[2] + lanes[3]
    bins = [sum(column) for column in zip(*(node[5] for node in nodes), strict=True)]
    assert stacks.steps_per_bin == 4
    assert bins[0] > 0
    assert bins[10] > 0
    assert sum(bins) == pytest.approx(sum(lanes))
    stacks.renew()
    assert stacks.seen() == []


def test_what_another_thread_does_is_not_seen_and_clocks_of_others_are_left_alone():
    clock = Clock()
    stacks = stacks_of(clock)
    clock.thread = 0  # as while the observer looks
    stacks.start()
    worker = threading.Thread(target=in_c, args=(50,))
    worker.start()
    in_python(50)
    worker.join()
    stacks.stop()
    assert stacks.seen() == []


def made(number):
    names = {}
    exec(f"def work():\n    return sum(range(20_000)) + {number}", names)
    return names["work"]


def test_code_that_comes_and_goes_does_no_harm():
    stacks = stacks_of(Clock())
    stacks.start()
    numbers = iter(range(10**9))

    def come_and_go(ms):
        until = time.thread_time() + ms / 1e3
        while time.thread_time() < until:
            made(next(numbers))()
            gc.collect(0)

    work_until(stacks, 20, (come_and_go, 50))
    stacks.stop()
    assert stacks.seen()


def deep(levels, ms):
    if levels:
        return deep(levels - 1, ms)
    return in_python(ms)


def test_deep_stacks_generators_and_a_second_watcher():
    first, second = stacks_of(Clock()), stacks_of(Clock())
    first.start()
    second.start()  # ends the first
    work_until(second, 8, (partial(deep, 120), 20))
    next(one for one in (in_python(60) for _ in range(2)) if one is None)
    deep(600, 60)  # too deep: left out
    second.stop()
    second.stop()
    assert first.seen() == [] or first.cpu_ns >= 0
    assert second.seen()
    del first, second


def test_a_forked_process_is_not_watched_and_ends():
    stacks = stacks_of(Clock())
    stacks.start()
    child = os.fork()
    if not child:
        in_python(20)
        stacks.stop()
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    stacks.stop()
