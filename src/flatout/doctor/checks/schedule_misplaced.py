"""Check for schedulers of the learning rate that are stepped at the wrong times."""

from __future__ import annotations

from flatout.doctor.checks.check import Findings, NoSignal, check
from flatout.doctor.checks.signals import at, batches_per_step, epoch_steps
from flatout.doctor.finding import Finding, Kind
from flatout.observe import Observation, Schedule

_EPOCHS = 3
"""Minimum number of epochs after which a scheduler that was never stepped is reported."""

_LEAST = 8
"""Minimum number of a schedule's steps to conclude that it is stepped with each batch."""

_SHORTEST = 4
"""Minimum number of steps per epoch to distinguish stepping per epoch from stepping per batch."""

_OFTENER = 1.5
"""Steps of the schedule per optimizer step from which on it is stepped with each micro-batch."""


@check()
def look(observation: Observation) -> Findings:
    """Report schedulers that are stepped too often, too rarely, too early or never.

    Too often: with each batch, though the rate then ends soon. Too rarely: once per epoch, though
    the schedule is made for batches. Too early: before the optimizer.
    """
    if not observation.steps:
        raise NoSignal("no step was observed")
    used = [schedule for schedule in observation.schedules if schedule.is_used]
    for item in used:
        if item.first_after == 0 and batches_per_step(observation) < _OFTENER:
            yield _finding(
                "note",
                f"{item.kind} was stepped before the optimizer: the first rate of the schedule is "
                "left out",
                "scheduler.step() after optimizer.step()",
                at(item.stepped_at),
            )
        found = (
            _of_each_batch(observation, item)
            or _of_each_part(observation, item)
            or _of_each_epoch(observation, item)
        )
        if found:
            yield found
    epochs = max((loader.epochs for loader in observation.loaders if loader.in_training), default=0)
    if observation.lapse is not None and not observation.lapse.steps_schedules:
        # Epochs that end early may skip the line that steps it.
        epochs += observation.lapse.epochs
    if observation.tables and not epochs:
        epochs = int(observation.steps // max(epoch_steps(observation), 1.0))
    if used and not any(item.steps or item.in_lapse for item in used) and epochs >= _EPOCHS:
        yield _of_none(observation, used[0], epochs)


def _of_none(observation: Observation, schedule: Schedule, epochs: int) -> Finding:
    is_by_loss = "Plateau" in schedule.kind
    is_due = not is_by_loss or observation.evaluation_site is not None
    return _finding(
        "danger" if is_due else "note",
        f"{epochs} epochs have begun, and {schedule.kind} was never stepped: the learning rate "
        "stays as it was",
        f"scheduler.step({'loss' if is_by_loss else ''}) at the end of each epoch",
        at(schedule.site),
    )


def _of_each_batch(observation: Observation, schedule: Schedule) -> Finding | None:
    is_each = observation.steps >= _LEAST and schedule.steps >= observation.steps - 2
    length = epoch_steps(observation)
    if not is_each or schedule.ends_after is None or not length:
        return None
    ends_after = schedule.ends_after / max(1.0, schedule.steps / observation.steps)
    if ends_after >= length:
        return None
    is_past = schedule.steps >= schedule.ends_after
    loop = next((item for item in observation.epoch_loops if item[1] == schedule.made_for), None)
    more = ", yet training goes on" if is_past else ""
    if loop is not None and loop[1] > 1:
        more += f"; it is made for {loop[1]}, the epochs of the loop in line {loop[0].line}"
    return _finding(
        "danger" if is_past or loop is not None else "note",
        f"{schedule.kind} is stepped with each batch, and its rate is as good as nothing after "
        f"{ends_after:,.0f} of an epoch's {length:,.0f} steps{more}",
        "step it once an epoch, or make it for epochs * len(loader) steps",
        at(schedule.stepped_at or schedule.site),
    )


def _of_each_part(observation: Observation, schedule: Schedule) -> Finding | None:
    many = round(batches_per_step(observation))
    if observation.steps < _LEAST or many < 2:
        return None
    if schedule.steps < max(_OFTENER, 0.9 * many) * (observation.steps - 2):
        return None
    length, made_for = epoch_steps(observation), schedule.made_for
    if made_for is not None and length and _is_whole(made_for, length * many, observation):
        return None  # the schedule is made for that number of steps
    words = f"{schedule.kind} is stepped {many} times for each step of the optimizer"
    is_sure = False
    if made_for is not None and length and _is_whole(made_for, length, observation):
        is_sure = True
        words += (
            f": made for {made_for:,} of these, {made_for / length:.0f} epochs, its rate is at its "
            f"end after {made_for / many / length:.1f} epochs"
        )
    return _finding(
        "danger" if is_sure else "note",
        words,
        "scheduler.step() where optimizer.step() is, once in as many batches",
        at(schedule.stepped_at or schedule.site),
    )


def _of_each_epoch(observation: Observation, schedule: Schedule) -> Finding | None:
    length, made_for = epoch_steps(observation), schedule.made_for
    if made_for is None or length < _SHORTEST:
        return None
    turns = [turns for _, turns in observation.epoch_loops if turns > 1]
    # An incomplete last batch may count as a step or not.
    epochs = next((turns for turns in turns if abs(made_for - turns * length) <= turns), None)
    begun = max((item.epochs for item in observation.loaders if item.in_training), default=0)
    begun += observation.lapse.epochs if observation.lapse is not None else 0
    steps = schedule.steps + schedule.in_lapse
    is_seldom = 0 < steps <= begun and observation.steps >= max(_LEAST, _SHORTEST * schedule.steps)
    if epochs is None or not is_seldom:
        return None
    return _finding(
        "danger",
        f"{schedule.kind} is made for {made_for:,} steps, {epochs} epochs of "
        f"{made_for / epochs:,.0f}, and is stepped once an epoch: when all of them are over it has "
        f"come {epochs / made_for:.0%} of its way",
        "scheduler.step() after each optimizer.step(); or make it for as many steps as epochs",
        at(schedule.stepped_at or schedule.site),
    )


def _is_whole(made_for: int, length: float, observation: Observation) -> bool:
    epochs = round(made_for / length)
    known = [turns for _, turns in observation.epoch_loops if turns > 1]
    if known and epochs not in known:
        return False
    # An incomplete last micro-batch may count as a step or not.
    return epochs > 0 and abs(made_for - epochs * length) <= epochs


def _finding(kind: Kind, what: str, do: str, where: str) -> Finding:
    return Finding(kind=kind, what=what, do=do, where=where, parity="changes learning")
