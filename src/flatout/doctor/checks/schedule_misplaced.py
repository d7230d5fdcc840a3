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
def look(seen: Observation) -> Findings:
    """Whether one is stepped with each batch though its rate ends soon, never, or too early."""
    if not seen.steps:
        raise NoSignal("no step was seen")
    used = [one for one in seen.schedules if one.is_used]
    for one in used:
        if one.first_after == 0:
            yield _found(
                "note",
                f"{one.kind} was stepped before the optimizer: the first rate of the schedule is "
                "left out",
                "scheduler.step() after optimizer.step()",
                at(one.stepped_at),
            )
        if found := _of_each_batch(seen, one):
            yield found
    epochs = max((one.epochs for one in seen.loaders if one.in_training), default=0)
    if seen.lapse is not None and not seen.lapse.steps_schedules:
        # Where a line steps it, epochs that end early may not come to it.
        epochs += seen.lapse.epochs
    if seen.tables and not epochs:
        epochs = int(seen.steps // max(epoch_steps(seen), 1.0))
    if used and not any(one.steps or one.in_lapse for one in used) and epochs >= _EPOCHS:
        yield _found(
            "danger",
            f"{epochs} epochs have begun, and {used[0].kind} was never stepped: the learning rate "
            "stays as it was",
            "scheduler.step() at the end of each epoch",
            at(used[0].site),
        )


def _of_each_batch(seen: Observation, one: Schedule) -> Finding | None:
    """The finding where a rate comes to its end within the first epoch."""
    is_each = seen.steps >= _LEAST and one.steps >= seen.steps - 2
    length = epoch_steps(seen)
    if not is_each or one.ends_after is None or not length or one.ends_after >= length:
        return None
    is_past = one.steps >= one.ends_after
    return _found(
        "danger" if is_past else "note",
        f"{one.kind} is stepped with each batch, and its rate is as good as nothing after "
        f"{one.ends_after:,} of an epoch's {length:,.0f} steps"
        + (", yet training goes on" if is_past else ""),
        "step it once an epoch, or make it for epochs * len(loader) steps",
        at(one.stepped_at or one.site),
    )


def _found(kind: Kind, what: str, do: str, where: str) -> Finding:
    return Finding(kind=kind, what=what, do=do, where=where, parity="changes learning")
