import json
import os
import subprocess
import sys

import pytest

from flatout.devices import allocator, process
from flatout.recipe import Recipe

APPLY = """
import json, os, sys
import torch
from flatout.devices import process
from flatout.recipe import Recipe
for section in json.loads(sys.argv[1]):
    done = process.apply(Recipe(process=section).process)
    cpus = sorted(os.sched_getaffinity(0))
    print(json.dumps([done, [torch.get_num_threads(), torch.get_num_interop_threads(), cpus]]))
"""


@pytest.mark.slow
def test_what_is_asked_for_is_applied_and_what_comes_too_late_says_so() -> None:
    cpus = sorted(os.sched_getaffinity(0))
    one = cpus[-1:]
    sections = [
        {"threads": 3, "interop_threads": 4, "affinity": one, "flush_denormals": "on"},
        {"threads": 2, "interop_threads": 5, "affinity": "off", "flush_denormals": "off"},
    ]
    run = subprocess.run(
        [sys.executable, "-c", APPLY, json.dumps(sections)],
        capture_output=True,
        text=True,
        check=True,
        env={k: v for k, v in os.environ.items() if not k.endswith("_NUM_THREADS")},
    )
    (first, now), (second, later) = map(json.loads, run.stdout.splitlines())
    assert now == [3, 4, one]
    assert first == []
    assert later == [2, 4, cpus]
    assert [line.split(" = ")[0] for line in second] == [
        "process.interop_threads",
        "process.flush_denormals",
    ]
    assert "comes too late in this process" in second[0]


def test_auto_leaves_everything_alone() -> None:
    assert process.apply(Recipe().process) == []


def test_the_environment_holds_only_what_was_asked_for() -> None:
    assert process.environment(Recipe()) == {}
    asked = Recipe(memory={"allocator": "keep"}, process={"threads": 2, "affinity": [0]})
    assert process.environment(asked) == {**allocator.environment(), "OMP_NUM_THREADS": "2"}
    taken = process.at_start(asked)
    assert taken["process.threads"] == "2"
    assert taken["process.affinity"] == "0"
    assert ("memory.allocator" in taken) == allocator.supported()


def test_the_default_allocator_needs_no_variables() -> None:
    asked = Recipe(memory={"allocator": "default"})
    assert process.environment(asked) == process.at_start(asked) == {}
