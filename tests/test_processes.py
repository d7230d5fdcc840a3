"""Which processes one has started, and what CPU time the kernel has counted for it."""

import os
import resource
import subprocess
from threading import Thread

from flatout.processes import children, cpu_times_ns, descendants

TICK_NS = 1_000_000_000 // os.sysconf("SC_CLK_TCK")


def test_children_of_any_thread_and_theirs_are_listed():
    started = []

    def start():
        command = "sleep 600 & echo $!; wait"
        started.append(subprocess.Popen(["sh", "-c", command], stdout=subprocess.PIPE))

    thread = Thread(target=start)
    thread.start()
    thread.join()
    (shell,) = started
    sleep = int(shell.stdout.readline())
    try:
        assert shell.pid in children(os.getpid())
        assert sleep not in children(os.getpid())
        assert children(shell.pid) == [sleep]
        below = descendants(os.getpid())
        assert below[below.index(shell.pid) + 1] == sleep
    finally:
        os.kill(sleep, 9)
        shell.communicate()
    assert shell.pid not in children(os.getpid())
    assert (children(shell.pid), cpu_times_ns(shell.pid)) == ([], (0, 0))


def test_cpu_time_is_that_of_the_process_and_apart_that_of_ended_children():
    def used():
        both = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        return [round((usage.ru_utime + usage.ru_stime) * 1e9) for usage in both]

    subprocess.run(["sh", "-c", "i=0; while [ $i -lt 30000 ]; do i=$((i+1)); done"], check=True)
    before, counted, after = used(), cpu_times_ns(os.getpid()), used()
    for low, ns, high in zip(before, counted, after, strict=True):
        # User and system time are each cut to whole ticks.
        assert low - 2 * TICK_NS <= ns <= high
    assert counted[1] > 0
