"""The scheduler of the learning rate is stepped at the wrong times."""

from __future__ import annotations

from flatout.doctor.checks.check import Findings, NoSignal, check
from flatout.doctor.checks.signals import at, epoch_steps
from flatout.doctor.finding import Finding, Kind
from flatout.observe import Observation, Schedule

_EPOCHS = 3
"""Epochs that have to have begun, until a scheduler that was never stepped is no accident."""

_LEAST = 8
"""Steps that make a habit of stepping it with each batch."""


@check()
def look(observation: Observation) -> Findings:
    """Whether one is stepped with each batch though its rate ends soon, never, or too early."""
    if not observation.steps:
        raise NoSignal("no step was seen")
    used = [schedule for schedule in observation.schedules if schedule.is_used]
    for item in used:
        if item.first_after == 0:
            yield _finding(
                "note",
                f"{item.kind} was stepped before the optimizer: the first rate of the schedule is "
                "left out",
                "scheduler.step() after optimizer.step()",
                at(item.stepped_at),
            )
        if finding := _of_each_batch(observation, item):
            yield finding
    epochs = max((loader.epochs for loader in observation.loaders if loader.in_training), default=0)
    if observation.lapse is not None and not observation.lapse.steps_schedules:
        # Where a line steps it, epochs that end early may not come to it.
        epochs += observation.lapse.epochs
    if observation.tables and not epochs:
        epochs = int(observation.steps // max(epoch_steps(observation), 1.0))
    if used and not any(item.steps or item.in_lapse for item in used) and epochs >= _EPOCHS:
        yield _finding(
            "danger",
            f"{epochs} epochs have begun, and {used[0].kind} was never stepped: the learning rate "
            "stays as it was",
            "scheduler.step() at the end of each epoch",
            at(used[0].site),
        )


def _of_each_batch(observation: Observation, schedule: Schedule) -> Finding | None:
    """The finding where a rate comes to its end within the first epoch."""
    is_each = observation.steps >= _LEAST and schedule.steps >= observation.steps - 2
    length = epoch_steps(observation)
    if not is_each or schedule.ends_after is None or not length or schedule.ends_after >= length:
        return None
    is_past = schedule.steps >= schedule.ends_after
    return _finding(
        "danger" if is_past else "note",
        f"{schedule.kind} is stepped with each batch, and its rate is as good as nothing after "
        f"{schedule.ends_after:,} of an epoch's {length:,.0f} steps"
        + (", yet training goes on" if is_past else ""),
        "step it once an epoch, or make it for epochs * len(loader) steps",
        at(schedule.stepped_at or schedule.site),
    )


def _finding(kind: Kind, what: str, do: str, where: str) -> Finding:
    return Finding(kind=kind, what=what, do=do, where=where, parity="changes learning")
