"""The script by which `flatout top` looks into the nodes of a Ray cluster, beside a job."""

from __future__ import annotations

import json
from contextlib import suppress

from flatout.measure import SUBMITTED
from flatout.submit.job import Job
from flatout.submit.ray_driver import environment

_TOLD = "told by all nodes: "

_SCRIPT = '''#!/usr/bin/env python3
"""Prints what `flatout top` shows on each node: a list of texts, as JSON in a line."""

import json
import os
import subprocess
import sys
from pathlib import Path

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

ENVIRONMENT = {environment}


@ray.remote(num_cpus=0)
def ranks_here():
    """Of the ranks of the job on this node; or why there is nothing to tell."""
    # Where Ray's own Python is, flatout is too.
    path = f"{{Path(sys.executable).parent}}{{os.pathsep}}{{os.environ.get('PATH', '')}}"
    try:
        told = subprocess.run(
            ["flatout", "top", "--json", os.environ["{submitted}"]],
            env={{**os.environ, "PATH": path, **ENVIRONMENT}},
            capture_output=True,
            text=True,
        )
    except OSError as error:
        return str(error)
    return told.stderr if told.returncode else told.stdout


def main():
    ray.init()
    looks = []
    for node in ray.nodes():
        if node["Alive"]:
            there = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            looks.append(ranks_here.options(scheduling_strategy=there).remote())
    print("{told}" + json.dumps(ray.get(looks)))


if __name__ == "__main__":
    main()
'''


def top_script(job: Job) -> str:
    """The script, for `python top.py` on a node of the cluster."""
    return _SCRIPT.format(environment=repr(environment(job)), submitted=SUBMITTED, told=_TOLD)


def told_by_nodes(printed: str) -> list[str] | None:
    """What each node with ranks of the job has told, or all where none has any."""
    lines = [line for line in printed.splitlines() if line.startswith(_TOLD)]
    if not lines:
        return None
    told: list[str] = json.loads(lines[-1].removeprefix(_TOLD))
    return [text for text in told if _has_ranks(text)] or told


def _has_ranks(text: str) -> bool:
    with suppress(ValueError, LookupError, TypeError):
        return bool(json.loads(text)["jobs"])
    return False
