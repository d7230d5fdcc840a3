"""Check for target networks that keep their initial weights while the trained model changes."""

from __future__ import annotations

from flatout.doctor.checks.check import Findings, NoSignal, check
from flatout.doctor.checks.signals import at
from flatout.doctor.finding import Finding
from flatout.observe import Observation

_WHOLE, _STOPPED = 200, 20_000
"""Minimum number of steps in which a target network has to change.

_WHOLE: in a run observed to its end; _STOPPED: in a run that may have been stopped before.
"""


@check(hooks=True)
def look(observation: Observation) -> Findings:
    """Report copies of a trained model that compute its targets and have not changed."""
    needed = _WHOLE if observation.ended == "done" else _STOPPED
    if observation.still_targets and observation.steps < needed:
        raise NoSignal(
            f"{observation.steps:,} steps were observed, too few to tell that a target "
            "network stays"
        )
    for still in observation.still_targets:
        name = still.kind.rpartition(".")[2]
        yield Finding(
            kind="danger",
            what=f"{name}, a copy of the model that is trained, gives it targets and has not moved "
            f"in {still.steps:,} steps: its weights are bitwise those of the beginning",
            do="load the trained one's state dict into it every so many steps, or move its weights "
            "by a share of the difference in each",
            where=at(still.site),
            parity="changes learning",
        )
