"""Measuring: where a step's time went, whether B beats A, and whether the result is the same.

What needs numpy loads lazily: a job's CPU and memory limits are read before it starts, when the
import of numpy would only delay it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from flatout.measure.cgroup import cgroup_cpu_quota, cgroup_memory_limit, usable_cpus
from flatout.measure.fingerprint import Fingerprint, fingerprint
from flatout.measure.meters import available_bytes, cpu_seconds, page_faults, resident_bytes

if TYPE_CHECKING:
    from flatout.measure.parity import CurveDifference, Difference, compare_curves, compare_tensors
    from flatout.measure.timeline import LANES, Timeline
    from flatout.measure.trial import (
        Interval,
        OutOfTime,
        TrialResult,
        bootstrap_paired,
        bootstrap_ratio,
        noise_floor,
        run_trial,
    )

_HOMES = {
    "LANES": "flatout.measure.timeline",
    "CurveDifference": "flatout.measure.parity",
    "Difference": "flatout.measure.parity",
    "Interval": "flatout.measure.trial",
    "OutOfTime": "flatout.measure.trial",
    "Timeline": "flatout.measure.timeline",
    "TrialResult": "flatout.measure.trial",
    "bootstrap_paired": "flatout.measure.trial",
    "bootstrap_ratio": "flatout.measure.trial",
    "compare_curves": "flatout.measure.parity",
    "compare_tensors": "flatout.measure.parity",
    "noise_floor": "flatout.measure.trial",
    "run_trial": "flatout.measure.trial",
}

__all__ = [
    "LANES",
    "CurveDifference",
    "Difference",
    "Fingerprint",
    "Interval",
    "OutOfTime",
    "Timeline",
    "TrialResult",
    "available_bytes",
    "bootstrap_paired",
    "bootstrap_ratio",
    "cgroup_cpu_quota",
    "cgroup_memory_limit",
    "compare_curves",
    "compare_tensors",
    "cpu_seconds",
    "fingerprint",
    "noise_floor",
    "page_faults",
    "resident_bytes",
    "run_trial",
    "usable_cpus",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'flatout.measure' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
