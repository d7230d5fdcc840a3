"""Check for more loader workers than CPUs, so that workers and model wait for each other."""

from __future__ import annotations

from flatout.doctor.checks.check import Findings, NoSignal, check
from flatout.doctor.checks.signals import at, made, training_loaders
from flatout.doctor.edits import arguments
from flatout.doctor.finding import Finding
from flatout.observe import Observation

_CROWDED = 1.25
"""Runnable threads per CPU from which on some thread waits for a CPU most of the time."""


@check(edit=arguments.workers, lane="input")
def look(observation: Observation) -> Findings:
    """Report more workers than CPUs, if there are also more runnable threads than CPUs."""
    crowds = [loader for loader in training_loaders(observation) if (loader.num_workers or 0) > 1]
    if not crowds:
        return
    cpus = observation.usable_cpus
    if cpus is None or observation.runnable is None:
        raise NoSignal("the number of processes that wait for a CPU was not observed")
    if observation.runnable < _CROWDED:
        return
    for loader in crowds:
        if (loader.num_workers or 0) > cpus:
            yield Finding(
                kind="slow",
                what=f"{loader.num_workers} workers on {cpus} usable CPUs: "
                f"{observation.runnable:.1f} processes and threads want each CPU",
                do=f"num_workers={max(1, cpus // 2)}, or fewer",
                where=at(made(loader)),
                parity="redrawn",
                recipe={} if loader.is_iterable else {"input.workers": max(1, cpus // 2)},
            )
