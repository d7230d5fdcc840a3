"""Reasons why a script cannot be tried here."""

from __future__ import annotations

import os
from collections.abc import Sequence

from flatout.devices.gpu_use import gpu_use
from flatout.doctor.judge import Verdict
from flatout.measure import available_bytes
from flatout.observe import Observation
from flatout.words import memory_words


def why_no_trial(verdict: Verdict) -> str:
    """Return why no trial of this script can be made on this machine; "" if one can."""
    if not verdict.observations or not verdict.steps:
        return "the script took no optimizer step, so there is nothing to measure"
    if verdict.ended == "failed":
        return "the script failed by itself"
    return _other_jobs(verdict.observations) or _no_room(verdict.observations)


def _other_jobs(ranks: Sequence[Observation]) -> str:
    if not any(rank.device.startswith("cuda") for rank in ranks):
        return ""
    for gpu in gpu_use():
        others = [pid for pid in gpu.pids if pid != os.getpid()]
        if others:
            named = ", ".join(map(str, others[:4]))
            return f"GPU {gpu.index} is used by another job (process {named}): wait for its end"
    return ""


def _no_room(ranks: Sequence[Observation]) -> str:
    for rank in ranks:
        peak, there_is = rank.device_peak_mb, rank.device_total_mb
        if peak and there_is and 2 * peak > there_is:
            needed_words, has = memory_words(2 * peak * 2**20), memory_words(there_is * 2**20)
            return f"two copies of the script need {needed_words} of {rank.device}, which has {has}"
    needed = 2 * sum(max(rank.memory_mb, default=0.0) for rank in ranks) * 2**20
    free = available_bytes()
    if needed <= free:
        return ""
    words = f"two copies of the script need about {memory_words(needed)} of memory"
    return f"{words}, and {memory_words(free)} are free"
