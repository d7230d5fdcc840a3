"""A scheduler lowers the learning rate while what it looks at gets better."""

from __future__ import annotations

from flatout.doctor.checks.check import Findings, NoSignal, check
from flatout.doctor.checks.signals import at
from flatout.doctor.finding import Finding
from flatout.observe import Observation

_BETTER = {"loss": "min", "score": "max"}


@check()
def look(observation: Observation) -> Findings:
    """ReduceLROnPlateau that is given a loss in mode "max", or a score in mode "min"."""
    if not observation.steps:
        raise NoSignal("no step was seen")
    for schedule in observation.schedules:
        better = _BETTER.get(schedule.given_kind)
        if not schedule.is_used or not schedule.mode or better in (None, schedule.mode):
            continue
        goes = "falls" if better == "min" else "rises"
        told = "" if schedule.mode == "max" else ", which is the default"
        yield Finding(
            kind="danger",
            what=f'{schedule.kind} is in mode "{schedule.mode}"{told}, and stepped with '
            f"{schedule.given}, a {schedule.given_kind}: it takes it for no progress when that "
            f"{goes}, and lowers the learning rate",
            do=f'{schedule.kind}(optimizer, mode="{better}")',
            where=at(schedule.stepped_at),
            parity="changes learning",
        )
