"""Verdicts made up for tests, as plain data."""

from typing import Any

from report_prescriptions import prescription

from flatout.doctor import Finding
from flatout.observe import Call, Observation, Site

LANES = {
    "input": 40.0,
    "copy": 1.0,
    "forward": 20.0,
    "backward": 30.0,
    "sync": None,
    "optimizer": 6.0,
    "host": 2.0,
    "evaluation": 5.0,
    "gc": 0.5,
    "idle": 0.5,
}


def observation(rank: int = 0, **other: Any) -> dict[str, Any]:
    """One rank of one hundred steps of about 100 ms."""
    known: dict[str, Any] = {
        "command": ["train.py", "--epochs", "5"],
        "rank": rank,
        "steps": 100,
        "step_ms": [90.0 + (7 * at) % 21 for at in range(100)],
        "lanes_ms": LANES,
        "memory_mb": [500.0, 510.0],
        "memory_at": [0, 50],
        "calls": [Call("item", Site("train.py", 88, "total += loss.item()"))],
        "added_us_per_step": 3.1,
    }
    return Observation(**{**known, **other}).as_dict()


def finding(name: str = "item", kind: str = "slow", **other: Any) -> dict[str, Any]:
    known: dict[str, Any] = {"what": f"{name} was found", "do": f"mend {name}"}
    return Finding(kind, name=name, **{**known, **other}).as_dict()  # type: ignore[arg-type]


def verdict(**other: Any) -> dict[str, Any]:
    """One with something in every part of it."""
    known: dict[str, Any] = {
        "command": "train.py --epochs 5",
        "environment": {"torch": "2.13.0", "CPUs": "2 of 64", "versions": {"numpy": "2.4"}},
        "observations": [observation(0), observation(1, lanes_ms={**LANES, "input": 20.0})],
        "findings": [
            finding("train mode", "danger", where="train.py:120"),
            finding("item", "slow", where="train.py:88", cost_ms=4.0, parity="bit-identical"),
            finding(
                "workers", "slow", cost_ms=38.0, recipe={"input.workers": 6}, proven=(2.2, 2.3, 2.4)
            ),
            finding("busy", "note"),
        ],
        "critical": {"words": "the model waits for input", "share": 0.3, "where": "train.py:88"},
        "passed": ["pin memory", "set epoch"],
        "unknown": [["allocator", "the kernel does not count page faults here"]],
        "prescription": prescription().as_dict(),
    }
    return {**known, **other}
