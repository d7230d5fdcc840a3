"""Run folders whose truth is known: their steps are drawn from the model with known machines."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from flatout.forecast.job import Job, Shape, cut
from flatout.forecast.step import MachineDraws, step_terms
from flatout.measure import LANES
from made_up_profiles import CPU_HOST, GPU_HOST, gpu_use, made_up

TRAINED = 25_000_000
JOB = Job(buckets=cut(4.0 * TRAINED), batch=64, backward=0.5, reduction="nccl")


def truth(**changes):
    """What the machines are, in one draw."""
    values = {
        "seconds": 0.2, "fixed": 0.1, "contention": 0.02, "power": 0.5, "spread": 0.0,
        "hidden": 1.0, "rtt": 2e-4, "nic": 0.6 * 1.25e9, "summing": 2e10, "inside": 2e10,
        "input": np.inf, "total_input": np.inf,
    } | changes  # fmt: skip
    return MachineDraws(**{name: np.array([value]) for name, value in values.items()})


def seconds_of(shape, machines=None, job=JOB):
    """Of a step, in truth."""
    found = truth() if machines is None else machines
    return float(sum(step_terms(job, shape, found).values())[0])


def profile(folder, ranks=1, *, hosts=1, batch=64, seconds=None, busy=0.95, **changes):
    """A Profile of a run of so many ranks, whose steps have 1% of noise.

    Args:
        folder: of the run.
        ranks: of all hosts.
        hosts: how many.
        batch: of a rank.
        seconds: of a step; None is the truth.
        busy: what share of the GPU's time it ran.
        changes: of the Profile's fields.
    """
    shape = Shape(hosts, ranks // hosts, float(batch))
    took = seconds_of(shape) if seconds is None else seconds
    drawn = took * 1e3 * np.random.default_rng(ranks).lognormal(0, 0.01, 400)
    lanes = dict.fromkeys(LANES, 0.0) | {"forward": 90.0, "backward": 100.0, "optimizer": 10.0}
    fields = {
        "rank": {
            "device": "cuda:0",
            "lanes_ms": lanes,
            "use": gpu_use(busy),
            "machine": dict(GPU_HOST),
        },
        "startup_s": 10.0,
        "evaluation_s": 0.0,
        "saving_s": 0.0,
        "model": {"name": "Net", "parameters": TRAINED, "trained": TRAINED},
        "job": {"loss": "cross_entropy", "epochs": "2"},
        "data": {"words": "", "digest": "d", "samples": 640_000, "bytes": 640_000 * 1000},
        "input": {"bytes_per_sample": 1000.0},
        "epochs": [{"samples": 640_000, "at_s": 100.0}, {"samples": 1_280_000, "at_s": 200.0}],
    }
    given = fields | changes
    return made_up(folder, drawn, ranks=ranks, hosts=hosts, batch_size=batch * ranks, **given)


def make_run(folder, *args, **given):
    """Write a run folder; returns it as text."""
    folder.mkdir(parents=True)
    profile(folder, *args, **given).write(folder)
    return str(folder)


def on_cpu(made, busy=1.0, cpus=8):
    """The Profile as of a CPU."""
    use = {"seconds": [2.0, 4.0], "cpus": [busy * cpus] * 2}
    machine = CPU_HOST | {"cpu": "other", "cpus": cpus}
    return replace(made, ranks=[replace(made.ranks[0], device="cpu", use=use, machine=machine)])
