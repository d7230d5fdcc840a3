"""Profiles as runs leave them, made up, so that what is read of them can be compared with it."""

from __future__ import annotations

from dataclasses import replace

from flatout.measure import LANES, Profile, RankProfile, Steps

CPU_HOST = {"os": "Linux x86_64", "cpu": "made up", "cpus": 2, "gpus": [], "torch": "2.13.0"}
GPU_HOST = CPU_HOST | {"cpus": 32, "gpus": ["made up"] * 4}
CPU_USE = {
    "seconds": [2.0, 4.0, 6.0],
    "cpus": [1.5, 1.9, 1.8],
    "machine": [0.8, 0.9, 1.0],
    "memory_bytes": [1e9, 1.1e9, 1.2e9],
}
NOW = 1_795_686_400.0


def gpu_use(busy):
    """What a rank records whose GPU is busy for so large a share of the time."""
    points = {"gpu": [busy] * 3, "gpu_memory_bytes": [6e9] * 3}
    return CPU_USE | {"cpus": [1.0] * 3} | points


def made_up(folder, step_ms, *, ranks=1, hosts=1, batch_size=64.0, rank=None, **changes):
    """A Profile of a run on a CPU that has ended.

    Args:
        folder: of the run.
        step_ms: of its steady steps.
        ranks: of all hosts.
        hosts: how many.
        batch_size: of a step, of all ranks.
        rank: fields of what the first rank tells.
        changes: of the Profile's fields.
    """
    count = len(step_ms)
    first = RankProfile(
        rank=0,
        node=0,
        host="here",
        device="cpu",
        threads=2,
        steps=count,
        lanes_ms=dict.fromkeys(LANES, 0.0),
        quantiles_ms={},
        waited_ms=0.0,
        use=dict(CPU_USE),
        machine=dict(CPU_HOST),
    )
    made = Profile(
        run=str(folder),
        command=["train.py", "--epochs", "2"],
        kind="Trainer",
        state="ended",
        error=None,
        began=NOW,
        written=NOW + 60,
        startup_s=3.0,
        evaluation_s=1.0,
        saving_s=0.5,
        resumed=None,
        model={"name": "Net", "parameters": 1_200_000, "trained": 1_200_000},
        job={"loss": "cross_entropy"},
        world={
            "size": ranks,
            "nodes": hosts,
            "ranks_per_node": ranks // hosts,
            "strategy": "ddp" if ranks > 1 else None,
        },
        versions={"flatout": "0.1.0", "torch": "2.13.0", "python": "3.12.1"},
        network=None,
        recipe={"summary": "", "values": {"world.reduction": "auto"}, "reasons": {}},
        data={"words": "2 files", "digest": "d1", "samples": 800, "files": 2, "bytes": 1 << 20},
        input={"bytes_per_sample": 136.0},
        communication={},
        steps=Steps(
            first=1,
            last=count,
            samples=int(batch_size) * count,
            batch_size=float(batch_size),
            steady=count,
            step_ms=[float(f"{one:.5g}") for one in step_ms],
        ),
        ranks=[replace(first, **(rank or {}))],
        epochs=[],
        notes=[],
    )
    return replace(made, **changes)
