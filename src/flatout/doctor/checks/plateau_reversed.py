"""Check for schedulers that lower the learning rate while their metric improves."""

from __future__ import annotations

from collections.abc import Iterator

from flatout.doctor.checks.check import Findings, NoSignal, check
from flatout.doctor.checks.signals import at, in_mode, other_mode
from flatout.doctor.finding import Finding
from flatout.observe import Monitor, Observation, Schedule


@check()
def look(observation: Observation) -> Findings:
    """Report ReduceLROnPlateau with a loss in mode "max", or with a score in mode "min"."""
    if not observation.steps:
        raise NoSignal("no step was observed")
    for schedule in observation.schedules:
        if schedule.is_used and schedule.mode:
            yield from _judged(_monitor_of(schedule), "stepped with", "(optimizer, mode=")
    for monitor in observation.monitors:
        if monitor.acts == "lowers":
            yield from _judged(monitor, "looks at", "(..., mode=")


def _monitor_of(schedule: Schedule) -> Monitor:
    return Monitor(
        schedule.kind,
        schedule.given,
        schedule.mode,
        schedule.given_kind,
        "lowers",
        is_default=schedule.mode == "min",
        site=schedule.stepped_at,
    )


def _judged(monitor: Monitor, takes: str, call: str) -> Iterator[Finding]:
    better = other_mode(monitor)
    if not better:
        return
    goes = "falls" if better == "min" else "rises"
    yield Finding(
        kind="danger",
        what=f"{monitor.kind} is {in_mode(monitor)}, and {takes} {monitor.metric}, a "
        f"{monitor.metric_kind}: it counts no progress when the {monitor.metric_kind} "
        f"{goes}, and lowers the learning rate",
        do=f'{monitor.kind}{call}"{better}")',
        where=at(monitor.site),
        parity="changes learning",
    )
