"""Times the parts of recording a run of so many steps, in microseconds, as one line of JSON."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from statistics import median
from time import perf_counter_ns as clock

import torch
from torch import nn

import flatout

LOOKS, WRITES, CHECKS = 300, 9, 200_000


def each(count: int, call: Callable[[], object]) -> float:
    """The median microseconds of a call."""
    found = []
    for _ in range(count):
        began = clock()
        call()
        found.append((clock() - began) / 1e3)
    return median(found)


def checks() -> float:
    """Microseconds of comparing the clock, which is read anyway, with when a look is due."""
    due, now = sys.maxsize, clock()
    began = clock()
    for _ in range(CHECKS):
        if now >= due:
            raise AssertionError
    compared = clock() - began
    began = clock()
    for _ in range(CHECKS):
        pass
    return (compared - (clock() - began)) / CHECKS / 1e3


def main() -> None:
    loop = flatout.Loop(run="run", say=lambda line: None)
    model = nn.Linear(4, 2)
    loop.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(int(sys.argv[1])):
        loop.timeline.record(step * 1_000_000, 1000, 10, 300_000, 500_000, 0, 100_000, 10, 32)
    recording = loop.monitor.recording
    assert recording is not None
    use = recording._use
    workers = [subprocess.Popen([sys.executable, "-c", "input()"], stdin=-1) for _ in range(2)]

    def look() -> None:
        use._at -= 10 * use._every_ns  # as if the one before were long ago
        use.look()

    look_us = each(LOOKS, look)
    write_us = each(WRITES, lambda: recording._profile("running", None).write("run"))
    for worker in workers:
        worker.kill()
        worker.wait()
    loop.close()
    print(json.dumps({"check_us": checks(), "look_us": look_us, "write_us": write_us}))


if __name__ == "__main__":
    main()
